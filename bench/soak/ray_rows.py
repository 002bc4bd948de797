"""Rows of `scripts/soak --ray`: kills, scaling, updates and routing of replicas on a real Ray cluster."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from bench.soak.client import COMPLETIONS, Answer, Client
from bench.soak.cluster import Cluster, replicas
from bench.soak.load import Body, body, closed_loop
from bench.soak.row import Result, Soak, by_name, percentile
from bench.soak.server import engine_of, run, until

HEADER = "x-outpace-replica"
SMALL = ("--max-num-seqs", "4", "--no-access-log", "--template-processes", "1")
ONE_SLOT = ("--max-num-seqs", "1", *SMALL[2:])
"""Replicas whose batch is full with one request, so that others wait for it."""
FAST_CHECKS = ("--health-check-period", "1")
PATIENT = ("--shutdown-timeout", "60")
SUITE = "tests/server/test_openai_client.py"
NOT_OF_SEVERAL = f"{SUITE}::test_priority"
"""Not for several replicas: urgent requests overtake only those at the same replica, and the test fills one."""
WAIT = 300.0  # timeout in seconds until replicas start or stop
LONG_SHARE = 0.04  # share of long requests when routers are compared; below 5 %, so that P95 is of a short one
LONG, SHORT = 240, 8  # tokens
ROUNDS = 5  # with each router
CLIENTS = 8


def outcomes_of(answers: Sequence[Answer], *, streams: bool) -> Counter[str]:
    """Number of streams, or of plain requests, by outcome."""
    return Counter(each.outcome for each in answers if each.is_stream == streams)


def seen(answers: Sequence[Answer], since: float = 0.0) -> set[str]:
    """Replicas with answers that ended after `since`, in seconds of `time.perf_counter`."""
    return {each.headers[HEADER] for each in answers if each.end > since and HEADER in each.headers}


def both_answer(answers: Sequence[Answer], since: float) -> bool:
    """Whether two replicas answered since then, and enough requests started that both must have got some."""
    return len(seen(answers, since)) >= 2 and sum(each.begin > since for each in answers) >= 32


async def more(answers: Sequence[Answer], count: int) -> None:
    """Wait for that many more answers."""
    goal = len(answers) + count
    await until(lambda: len(answers) >= goal, f"{count} answers", WAIT)


@contextlib.asynccontextmanager
async def loaded(cluster: Cluster, plain: int, streaming: int, tokens: int) -> AsyncIterator[list[Answer]]:
    """Clients that send requests until the end, and wait for the last answers; yields the growing list of answers."""
    client, answers, stopping = Client(port=cluster.port, patience=WAIT), list[Answer](), asyncio.Event()
    numbers = itertools.count(1)

    def bodies(stream: bool) -> Iterator[Body]:
        while not stopping.is_set():
            yield body(next(numbers), tokens, stream=stream)

    kinds = {False: plain, True: streaming}
    loops = [asyncio.create_task(closed_loop(client, kinds[kind], bodies(kind), answers)) for kind in kinds]
    try:
        yield answers
    finally:
        stopping.set()
        await asyncio.gather(*loops)


async def r1(soak: Soak, cluster: Cluster) -> Result:
    """Run the server's whole suite of OpenAI's client against two replicas."""
    from tests.server.live import OPTIONS, write_model

    write_model(folder := cluster.folder / "suite")
    (options := cluster.folder / "suite.json").write_text(json.dumps(dict(OPTIONS)))
    took = await cluster.deploy("suite", folder, "--replicas", "2", "--config", str(options))
    soak.say("the suite")
    command = (sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", SUITE)
    url, hours = f"http://127.0.0.1:{cluster.port}", 2 * 3600
    code, said = await run(cluster.folder, *command, "--deselect", NOT_OF_SEVERAL, seconds=hours, OUTPACE_TEST_URL=url)
    names = {"model": OPTIONS["served_model_name"][0], "stream": False}
    bodies = (body(number, 2, **names) for number in range(16))
    found = seen(await closed_loop(Client(port=cluster.port, patience=WAIT), 1, bodies))
    await cluster.stop("suite")
    measured = f"{said.strip().splitlines()[-1]}; {len(found)} replicas answered; ready after {took:.0f} s"
    passed = code == 0 and len(found) == 2
    return Result("all tests pass with 2 replicas, and both answer", measured, passed, "1 run")


async def r2(soak: Soak, cluster: Cluster) -> Result:
    """kill -9 of a replica, or of the engine of one, under load."""
    await cluster.deploy("kill", soak.model, "--replicas", "2", *SMALL, *FAST_CHECKS)
    kills, back = soak.count(6), []
    async with loaded(cluster, 4, 4, 48) as answers:
        for number in range(kills):
            soak.say(f"{number + 1} of {kills}")
            await more(answers, 16)
            back.append(await _kill(answers, is_engine=number % 3 == 2))
    await cluster.stop("kill")
    plain, streams = outcomes_of(answers, streams=False), outcomes_of(answers, streams=True)
    passed = plain.keys() <= {"done"} and streams.keys() <= {"done", "failed"} and streams["failed"] > 0
    measured = (
        f"{plain['done']} of {plain.total()} plain requests answered ({dict(plain)}); {streams['done']} streams whole, "
        f"{streams['failed']} with an error, {streams.total() - streams['done'] - streams['failed']} broken off; "
        f"2 replicas again after {max(back):.0f} s at most"
    )
    soak.details["R-2"] = {"plain": dict(plain), "streams": dict(streams), "seconds until 2 answered again": back}
    target = "no plain request fails; streams end whole or with an error of their own"
    return Result(target, measured, passed, f"{kills} kills, of a replica or (every third) of its engine")


async def _kill(answers: Sequence[Answer], *, is_engine: bool) -> float:
    """kill -9 of the oldest replica or its engine; returns the seconds until two replicas answer again."""
    before, begin, when = set(replicas("kill")), time.monotonic(), time.perf_counter()
    os.kill(engine_of(min(before)) if is_engine else min(before), signal.SIGKILL)
    if not is_engine:
        await until(lambda: bool(set(replicas("kill")) - before), "a new replica", WAIT)
    await until(lambda: both_answer(answers, when), "two replicas that answer", WAIT)
    return time.monotonic() - begin


async def r3(soak: Soak, cluster: Cluster) -> Result:
    """One replica scales to 3 under load and back to 1; no request fails."""
    scale = ("--min-replicas", "1", "--max-replicas", "3", "--target-ongoing", "4")
    delays = ("--upscale-delay", "1", "--downscale-delay", "5")
    await cluster.deploy("scale", soak.model, *scale, *delays, *PATIENT, *SMALL)
    first = len(replicas("scale"))
    async with loaded(cluster, 7, 7, 32) as high:
        soak.say("up")
        up = await until(lambda: len(seen(high)) == 3, "three replicas that answer", WAIT)
        await more(high, 100)
    async with loaded(cluster, 1, 0, 32) as low:
        soak.say("down")
        down = await until(lambda: len(replicas("scale")) == 1, "one replica", WAIT)
        await more(low, 4)
    await cluster.stop("scale")
    ends = Counter(each.outcome for each in high + low)
    soak.details["R-3"] = {"ends": dict(ends), "seconds up": up, "seconds down": down}
    measured = f"{ends['done']} of {ends.total()} requests answered; 3 after {up:.0f} s, 1 after {down:.0f} s more"
    passed = first == 1 and ends.total() == ends["done"]
    return Result("1 to 3 to 1 under load, no request fails", measured, passed, "1 run")


async def r4(soak: Soak, cluster: Cluster) -> Result:
    """The same name is deployed again with other options, under load."""
    flags = ("--replicas", "2", *SMALL, *PATIENT)
    await cluster.deploy("update", soak.model, *flags)
    async with loaded(cluster, 3, 3, 32) as answers:
        await more(answers, 20)
        old = seen(answers)
        soak.say("updating")
        took = await cluster.deploy("update", soak.model, *flags, "--max-model-len", "4096")
        when = time.perf_counter()
        await until(lambda: both_answer(answers, when) and len(seen(answers, when)) == 2, "two new replicas", WAIT)
        new = seen(answers, max(each.end for each in answers) - 1)
    await cluster.stop("update")
    done = sum(each.outcome == "done" for each in answers)
    measured = f"{done} of {len(answers)} requests answered; new replicas after {took:.0f} s"
    passed = done == len(answers) and not old & new
    return Result("a rolling update under load, no request fails", measured, passed, "1 run")


async def r5(soak: Soak, cluster: Cluster) -> Result:
    """P95 of requests of mixed lengths with each router: two applications, loaded in turn."""
    found: dict[str, list[float]] = {"least-loaded": [], "round-robin": []}
    for routing in found:
        flags = ("--replicas", "2", "--routing", routing, "--root-path", f"/{routing}", *ONE_SLOT)
        await cluster.deploy(routing, soak.model, *flags)
        await _latencies(cluster, routing, [SHORT] * 8, 90_000)
    count = max(100, soak.count(200))
    for turn in range(ROUNDS):
        lengths = [LONG] * round(LONG_SHARE * count) + [SHORT] * (count - round(LONG_SHARE * count))
        soak.draw.shuffle(lengths)
        for routing in sorted(found, reverse=turn % 2 == 1):
            soak.say(f"{routing}, {turn + 1} of {ROUNDS}")
            found[routing].append(percentile(await _latencies(cluster, routing, lengths, 1000 * turn), 95))
    for routing in found:
        await cluster.stop(routing)
    ratios = sorted(ours / theirs for ours, theirs in zip(*found.values(), strict=True))
    soak.details["R-5"] = {"p95 seconds": found, "requests of a round": count, "ratios": ratios}
    shown = "; ".join(f"{name} {', '.join(f'{each:.2f}' for each in values)} s" for name, values in found.items())
    measured = f"P95 {shown}; ratios {', '.join(f'{each:.2f}' for each in ratios)}"
    target = f"P95 below round-robin's (median of rounds): {LONG_SHARE:.0%} of {LONG} tokens, others of {SHORT}"
    runs = f"{ROUNDS} rounds of {count} requests, {CLIENTS} clients, 2 replicas that run one request at a time"
    return Result(target, measured, ratios[len(ratios) // 2] < 1, runs)


async def _latencies(cluster: Cluster, routing: str, lengths: list[int], first: int) -> list[float]:
    """Seconds of each request, with `CLIENTS` in flight. first: number of the first prompt, new for each round."""
    bodies = (body(number, length, stream=False) for number, length in enumerate(lengths, first))
    client = Client(port=cluster.port, patience=WAIT)
    answers = await closed_loop(client, CLIENTS, bodies, path=f"/{routing}{COMPLETIONS}")
    assert all(each.outcome == "done" for each in answers), client.ledger
    return [each.seconds for each in answers]


RAY_ROWS = by_name(r1, r2, r3, r4, r5)
