"""Rows of faults: an engine that dies, fails or hangs; clients that disconnect; signals; starts that cannot work."""

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path

from bench.soak.client import Answer, Exchange
from bench.soak.load import body
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import FAULTY, OUTPACE, Server, end, engine_of, is_free, run, serving, session, stat

SHM = Path("/dev/shm")
KILLS = 4  # kills of one server: each restart waits twice as long as the previous one


async def begun(server: Server, count: int, max_tokens: int, at_event: int = 1) -> list[Exchange]:
    """Requests in flight, half of them streams that have reached event `at_event`."""
    sent = [await server.send(body(number, max_tokens), at_event=at_event) for number in range(count)]
    await asyncio.wait([each.reached for each in sent[::2]], timeout=60)
    return sent


def clean_error(answer: Answer) -> bool:
    """A 503 with Retry-After, or a stream that ends with an error."""
    return answer.outcome == "failed" or (answer.status == 503 and "retry-after" in answer.headers)


async def f1(soak: Soak) -> Result:
    """kill -9 of the engine process, mid-batch."""
    total, right = soak.count(20), 0
    failed_after, ready_after, shared = [0.0], [0.0], set(SHM.iterdir())
    for first in range(0, total, KILLS):
        async with serving(soak.model) as server:
            for number in range(first, min(first + KILLS, total)):
                soak.say(f"{number + 1} of {total}")
                sent, engine = await begun(server, 20, 2000), engine_of(server.pid)
                killed = time.monotonic()
                os.kill(engine, signal.SIGKILL)
                answers = await asyncio.gather(*map(server.receive, sent))
                failed_after.append(time.monotonic() - killed)
                await server.until_ready()
                ready_after.append(time.monotonic() - killed)
                again = await server.ask(body(1))
                right += (
                    all(map(clean_error, answers))
                    and failed_after[-1] < 2
                    and ready_after[-1] < server.start_seconds + 10
                    and again.outcome == "done"
                    and not stat(engine)
                )
            code = await end(server.process)
            await asyncio.sleep(0.2)
            left = session(server.pid)
        with socket.socket() as sock:
            is_listening = sock.connect_ex(("127.0.0.1", server.port)) == 0
        if code or left or is_listening or set(SHM.iterdir()) - shared:
            right -= KILLS
    measured = (
        f"{right}/{total}; clients got an error after at most {max(failed_after):.2f} s, "
        f"ready again after at most {max(ready_after):.1f} s"
    )
    target = "clients get an error < 2 s; ready < load time + 10 s; no process, port or shared memory left"
    return Result(target, measured, right == total, f"{total} kills")


async def f3(soak: Soak) -> Result:
    """An error in a step at a random moment."""
    total, good, lost, spared = soak.count(200), 0, 0, 0
    async with serving(soak.model, "--max-num-seqs", "8", "--deterministic", program=FAULTY) as server:
        probe = body(999, 8)
        right, engine = (await server.ask(probe)).text, engine_of(server.pid)
        for number in range(total):
            soak.say(f"{number + 1} of {total}")
            step = soak.draw.randrange(1, 24)
            sent = await begun(server, 4, step + 40, at_event=step)
            os.kill(engine, signal.SIGUSR1)
            answers = await asyncio.gather(*map(server.receive, sent))
            failed = sum(map(clean_error, answers))
            again = await server.ask(probe)
            status, _ = await server.idle()
            whole = is_free(status) and status["restarts"] == 0
            ended = failed + sum(answer.outcome == "done" for answer in answers) == len(answers)
            good += bool(failed) and ended and whole and again.outcome == "done" and again.text == right
            lost, spared = lost + failed, spared + len(answers) - failed
    measured = f"{good}/{total}; {lost} requests failed, {spared} had ended; the engine process stayed"
    target = "the batch fails with an error; the next request is right; no page lost"
    return Result(target, measured, good == total, f"{total} runs")


async def f6(soak: Soak) -> Result:
    """The engine's thread sleeps."""
    async with serving(soak.model, "--stall-timeout", "5", program=FAULTY) as server:
        soak.say("asleep")
        sent, engine = await begun(server, 8, 4000), engine_of(server.pid)
        os.kill(engine, signal.SIGUSR2)
        seen = await server.until_ready(False)
        answers = await asyncio.gather(*map(server.receive, sent))
        healed = await server.until_ready()
        again, log = await server.ask(body(1)), server.log.read_text()
    told, dump = sum(map(clean_error, answers)), "Fatal Python error" in log and "faulty.py" in log
    passed = seen < 15 and told == len(answers) and dump and not stat(engine) and again.outcome == "done"
    where = "in the log" if dump else "MISSING"
    measured = (
        f"503 after {seen:.1f} s, {told} of {len(answers)} got an error, stack {where}, ready {healed:.1f} s later"
    )
    return Result("ready is 503 < 15 s; stack in the log; restarted", measured, passed, "1 run")


async def f7(soak: Soak) -> Result:
    """SIGTERM with 50 requests in flight: they finish."""
    async with serving(soak.model, "--shutdown-timeout", "100") as server:
        sent = await begun(server, 50, 200)
        server.process.send_signal(signal.SIGTERM)
        await server.until_ready(False)
        late = await server.ask(body(1))
        answers = await asyncio.gather(*map(server.receive, sent))
        code = await asyncio.wait_for(server.process.wait(), 60)
    done = sum(answer.outcome == "done" for answer in answers)
    passed = done == len(answers) and late.status == 503 and code == 0
    measured = f"{done} of {len(answers)} finished, a new one got {late.status}, exit code {code}"
    return Result("new: 503; all in flight finish; exit code 0", measured, passed, "50 in flight")


async def f7b(soak: Soak) -> Result:
    """SIGTERM with a shutdown timeout of 0, and a second SIGTERM: all get an error."""
    answers, codes = list[Answer](), []
    for timeout in ("0", "100"):
        async with serving(soak.model, "--shutdown-timeout", timeout) as server:
            sent = await begun(server, 50, 4000)
            server.process.send_signal(signal.SIGTERM)
            if timeout != "0":
                await server.until_ready(False)
                server.process.send_signal(signal.SIGTERM)
            answers += await asyncio.gather(*map(server.receive, sent))
            codes.append(await asyncio.wait_for(server.process.wait(), 60))
    told = sum(map(clean_error, answers))
    measured = f"{told} of {len(answers)} got an error, exit codes {codes}"
    passed = told == len(answers) and codes == [3, 3]
    return Result("timeout 0 and second signal: all get an error; exit code 3", measured, passed, "2 x 50")


async def f8(soak: Soak, server: Server) -> Result:
    """Clients disconnect at random moments, more of them than the engine can run at once."""
    total, slots = soak.count(1000), asyncio.Semaphore(96)
    stages: Counter[str] = Counter()

    async def one(number: int) -> None:
        async with slots:
            draw, stay = soak.draw, 1 + soak.draw.randrange(24)
            exchange = await server.send(body(number, 24), at_event=stay)
            if draw.random() < 0.5:
                await asyncio.sleep(draw.random() ** 2 * 1.5)  # while queued, in prefill, or later
            else:
                await exchange.reached  # at this token, or once a plain answer has come
            exchange.leave()
            answer = await server.receive(exchange)
            stages["had ended" if not answer.left else "before a token" if not answer.first else "between"] += 1

    await asyncio.gather(*map(one, range(total)))
    begin = time.monotonic()
    status, counted = await server.idle()
    freed = time.monotonic() - begin
    leaked = status["num_blocks"] - status["free_blocks"]
    passed = not leaked and not status["running"] and not status["waiting"]
    measured = f"{dict(stages)}; {leaked} pages leaked, all free {freed:.2f} s after the last; server: {counted}"
    return Result("0 pages leaked; nothing runs on", measured, passed, f"{total} disconnects")


async def f11(soak: Soak) -> Result:
    """Starts that cannot work."""
    folder, model = soak.model.parent, str(soak.model)
    (folder / "bad.yaml").write_text("no-such-option: 1\n")
    (folder / "empty").mkdir(exist_ok=True)
    took, wrong = {}, []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = {
            "port in use": (model, "--device", "cpu", "--port", str(taken.getsockname()[1])),
            "bad option": (model, "--port", "0", "--block-size", "3"),
            "bad config": (model, "--port", "0", "--config", str(folder / "bad.yaml")),
            "missing folder": (str(folder / "none"), "--device", "cpu", "--port", "0"),
            "no model in it": (str(folder / "empty"), "--device", "cpu", "--port", "0"),
            "no such device": (model, "--device", "cuda:99", "--port", "0"),
        }
        for name, arguments in cases.items():
            soak.say(name)
            begin = time.monotonic()
            code, said = await run(folder, *OUTPACE, "serve", *arguments)
            took[name] = time.monotonic() - begin
            if code == 0 or not said.strip() or "Traceback" in said:
                wrong.append(f"{name}: {code} {said.strip().splitlines()[-1:]}")
    slowest = max(took, key=lambda name: took[name])
    measured = f"slowest {took[slowest]:.1f} s ({slowest}), median {percentile(list(took.values()), 50):.1f} s; {wrong}"
    passed = not wrong and took[slowest] < 5
    return Result("exit code not 0 in < 5 s, with the reason", measured, passed, f"{len(cases)} starts")
