"""Rows of faults: an engine that dies, fails or hangs; clients that leave; signals; starts that cannot work."""

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.soak.client import Answer, Exchange
from bench.soak.load import body
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import FAULTY, OUTPACE, Server, is_free, launch, serving, session, stat, until

SHM = Path("/dev/shm")
KILLS = 4  # of one server: each restart waits twice as long as the one before


async def begun(server: Server, count: int, max_tokens: int, at_event: int = 1) -> list[Exchange]:
    """Requests in flight, half of them streams, which have all had their first events."""
    opened = [await server.client.open(body(number, max_tokens), at_event=at_event) for number in range(count)]
    await asyncio.wait([each.reached for each in opened[::2]], timeout=60)
    return opened


async def ends(server: Server, opened: Sequence[Exchange]) -> list[Answer]:
    """Their answers."""
    return await asyncio.gather(*(server.client.close(each) for each in opened))


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
                opened, engine = await begun(server, 20, 2000), server.engine_pid
                killed = time.monotonic()
                os.kill(engine, signal.SIGKILL)
                answers = await ends(server, opened)
                failed_after.append(time.monotonic() - killed)
                await server.until_ready()
                ready_after.append(time.monotonic() - killed)
                again = await server.client.ask(body(1))
                right += (
                    all(map(clean_error, answers))
                    and failed_after[-1] < 2
                    and ready_after[-1] < server.start_seconds + 10
                    and again.outcome == "done"
                    and not stat(engine)
                )
            code = await server.end()
            await asyncio.sleep(0.2)
            left = session(server.pid)
        if code or left or not is_unused(server.client.port) or set(SHM.iterdir()) - shared:
            right -= KILLS
    measured = (
        f"{right}/{total}; clients got an error after at most {max(failed_after):.2f} s, "
        f"ready again after at most {max(ready_after):.1f} s"
    )
    target = "clients get an error < 2 s; ready < load time + 10 s; no process, port or shared memory left"
    return Result("F-1", target, measured, right == total, f"{total} kills")


def is_unused(port: int) -> bool:
    """Whether nobody listens on a port."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


async def f3(soak: Soak) -> Result:
    """An error in a step at a random moment."""
    total, good, lost, spared = soak.count(200), 0, 0, 0
    async with serving(soak.model, "--max-num-seqs", "8", "--deterministic", program=FAULTY) as server:
        probe = body(999, 8)
        right, engine = (await server.client.ask(probe)).text, server.engine_pid
        for number in range(total):
            soak.say(f"{number + 1} of {total}")
            step = soak.draw.randrange(1, 24)
            opened = await begun(server, 4, step + 40, at_event=step)
            os.kill(engine, signal.SIGUSR1)
            answers = await ends(server, opened)
            failed = sum(map(clean_error, answers))
            again = await server.client.ask(probe)
            status, _ = await server.idle()
            whole = is_free(status) and status["restarts"] == 0
            ended = failed + sum(answer.outcome == "done" for answer in answers) == len(answers)
            good += bool(failed) and ended and whole and again.outcome == "done" and again.text == right
            lost, spared = lost + failed, spared + len(answers) - failed
    measured = f"{good}/{total}; {lost} requests failed, {spared} had ended; the engine process stayed"
    target = "the batch fails with an error; the next request is right; no page lost"
    return Result("F-3", target, measured, good == total, f"{total} runs")


async def f6(soak: Soak) -> Result:
    """The engine's thread sleeps."""
    async with serving(soak.model, "--stall-timeout", "5", program=FAULTY) as server:
        soak.say("asleep")
        opened, engine = await begun(server, 8, 4000), server.engine_pid
        os.kill(engine, signal.SIGUSR2)
        seen = await until(server.is_not_ready, "the stall is seen", 60)
        answers = await ends(server, opened)
        healed = await server.until_ready()
        again, log = await server.client.ask(body(1)), server.log.read_text()
    told, dump = sum(map(clean_error, answers)), "Fatal Python error" in log and "faulty.py" in log
    passed = seen < 15 and told == len(answers) and dump and not stat(engine) and again.outcome == "done"
    where = "in the log" if dump else "MISSING"
    measured = (
        f"503 after {seen:.1f} s, {told} of {len(answers)} got an error, stack {where}, ready {healed:.1f} s later"
    )
    return Result("F-6", "ready is 503 < 15 s; stack in the log; restarted", measured, passed, "1 run")


async def f7(soak: Soak) -> Result:
    """SIGTERM with 50 requests in flight: they finish."""
    async with serving(soak.model, "--shutdown-timeout", "100") as server:
        opened = await begun(server, 50, 200)
        server.process.send_signal(signal.SIGTERM)
        await until(server.is_not_ready, "not ready after SIGTERM")
        late = await server.client.ask(body(1))
        answers = await ends(server, opened)
        code = await asyncio.wait_for(server.process.wait(), 60)
    done = sum(answer.outcome == "done" for answer in answers)
    passed = done == len(answers) and late.status == 503 and code == 0
    measured = f"{done} of {len(answers)} finished, a new one got {late.status}, exit code {code}"
    return Result("F-7", "new: 503; all in flight finish; exit code 0", measured, passed, "50 in flight")


async def f7b(soak: Soak) -> Result:
    """SIGTERM with a shutdown timeout of 0, and a second SIGTERM: all get an error."""
    found, codes = [], []
    for timeout in ("0", "100"):
        async with serving(soak.model, "--shutdown-timeout", timeout) as server:
            opened = await begun(server, 50, 4000)
            server.process.send_signal(signal.SIGTERM)
            if timeout != "0":
                await until(server.is_not_ready, "not ready after SIGTERM")
                server.process.send_signal(signal.SIGTERM)
            found += await ends(server, opened)
            codes.append(await asyncio.wait_for(server.process.wait(), 60))
    told = sum(map(clean_error, found))
    measured = f"{told} of {len(found)} got an error, exit codes {codes}"
    passed = told == len(found) and codes == [3, 3]
    return Result("F-7b", "timeout 0 and second signal: all get an error; exit code 3", measured, passed, "2 x 50")


async def f8(soak: Soak, server: Server) -> Result:
    """Clients that leave at random moments, more than the engine can run at once."""
    total, slots = soak.count(1000), asyncio.Semaphore(96)
    stages: Counter[str] = Counter()

    async def one(number: int) -> None:
        async with slots:
            draw, stay = soak.draw, 1 + soak.draw.randrange(24)
            opened = await server.client.open(body(number, 24), at_event=stay)
            if draw.random() < 0.5:
                await asyncio.sleep(draw.random() ** 2 * 1.5)  # while queued, in prefill, or later
            else:
                await opened.reached  # at this token, or once a plain answer has come
            opened.leave()
            answer = await server.client.close(opened)
            stages["had ended" if not answer.left else "before a token" if not answer.first else "between"] += 1

    await asyncio.gather(*(one(number) for number in range(total)))
    begin = time.monotonic()
    status, counted = await server.idle()
    freed = time.monotonic() - begin
    leaked = status["num_blocks"] - status["free_blocks"]
    passed = not leaked and not status["running"] and not status["waiting"]
    measured = f"{dict(stages)}; {leaked} pages leaked, all free {freed:.2f} s after the last; server: {counted}"
    return Result("F-8", "0 pages leaked; nothing runs on", measured, passed, f"{total} disconnects")


async def f11(soak: Soak) -> Result:
    """Starts that cannot work."""
    folder, model = soak.model.parent, str(soak.model)
    (folder / "bad.yaml").write_text("no-such-option: 1\n")
    (folder / "empty").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            "port in use": (model, "--device", "cpu", "--port", port),
            "bad option": (model, "--port", "0", "--block-size", "3"),
            "bad config": (model, "--port", "0", "--config", str(folder / "bad.yaml")),
            "missing folder": (str(folder / "none"), "--device", "cpu", "--port", "0"),
            "no model in it": (str(folder / "empty"), "--device", "cpu", "--port", "0"),
            "no such device": (model, "--device", "cuda:99", "--port", "0"),
        }
        took, wrong = {}, []
        for name, arguments in cases.items():
            soak.say(name)
            log, begin = folder / "start.log", time.monotonic()
            process = await launch(log, OUTPACE, "serve", *arguments)
            code = await asyncio.wait_for(process.wait(), 120)
            took[name] = time.monotonic() - begin
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            if code == 0 or not lines or "Traceback" in log.read_text():
                wrong.append(f"{name}: {code} {lines[-1:]}")
    slowest = max(took, key=lambda name: took[name])
    measured = f"slowest {took[slowest]:.1f} s ({slowest}), median {percentile(list(took.values()), 50):.1f} s; {wrong}"
    passed = not wrong and took[slowest] < 5
    return Result("F-11", "exit code not 0 in < 5 s, with the reason", measured, passed, f"{len(cases)} starts")
