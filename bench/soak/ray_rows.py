"""Rows of `scripts/soak --ray`: replicas on a real Ray cluster: deaths, scaling, updates, routing."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.soak.client import Answer, Client
from bench.soak.cluster import Cluster, engine_of, replicas, run_tests
from bench.soak.load import body
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import until

HEADER = "x-outpace-replica"
SMALL = ("--max-num-seqs", "4", "--no-access-log", "--template-processes", "1")
FAST_CHECKS = ("--health-check-period", "1")
SUITE = "tests/server/test_openai_client.py"
NOT_OF_SEVERAL = f"{SUITE}::test_priority"
"""Who is more urgent passes those who wait at the same replica; the test fills one."""
WAIT = 300.0  # seconds for replicas to come or go
LONG_SHARE, LONG, SHORT = (
    0.04,
    240,
    8,
)  # of the requests that compare routers; tokens. Fewer than 5 %: P95 is of a short one
ROUNDS = 5  # with each router
CLIENTS = 8
ONE_SLOT = ("--max-num-seqs", "1", "--no-access-log", "--template-processes", "1")
"""A full batch in small: whoever comes waits for what runs."""


@dataclass
class Load:
    """Clients that ask without end; what came of it."""

    client: Client
    answers: list[Answer] = field(default_factory=list)
    number: int = 0
    path: str = "/v1/completions"

    def ends(self, *, streams: bool) -> Counter[str]:
        """How requests ended."""
        return Counter(each.outcome for each in self.answers if each.is_stream == streams)

    @property
    def unfinished(self) -> list[str]:
        """Plain requests, and streams that broke off without an error, that have no whole answer."""
        plain = self.ends(streams=False)
        bad = {name: count for name, count in plain.items() if name != "done"}
        return [f"{count} {name}" for name, count in sorted(bad.items())] + [
            f"{count} streams {name}"
            for name, count in sorted(self.ends(streams=True).items())
            if name not in ("done", "failed")
        ]

    def seen(self, since: float = 0.0) -> set[str]:
        """Replicas that gave answers which ended after a moment of the performance clock."""
        return {each.headers[HEADER] for each in self.answers if each.end > since and HEADER in each.headers}

    async def ask(self, fields: Mapping[str, Any]) -> None:
        """One request."""
        self.answers.append(await self.client.ask(fields, self.path, patience=WAIT))


@asynccontextmanager
async def loaded(cluster: Cluster, clients: int, tokens: int, *, streams: bool) -> AsyncIterator[Load]:
    """So many clients, of which with `streams` every second asks for streams. At the end all get their answers."""
    load, stopping = Load(cluster.client), asyncio.Event()

    async def ask_on(index: int) -> None:
        while not stopping.is_set():
            load.number += 1
            await load.ask(body(load.number, tokens) | {"stream": streams and index % 2 == 1})

    tasks = [asyncio.create_task(ask_on(index)) for index in range(clients)]
    try:
        yield load
    finally:
        stopping.set()
        await asyncio.gather(*tasks)


async def r1(soak: Soak, cluster: Cluster) -> Result:
    """OpenAI's client against two replicas: the whole suite of the server."""
    from tests.server.live import OPTIONS, write_model

    write_model(folder := cluster.folder / "suite")
    flags = [text for name, value in OPTIONS.items() if name != "device" for text in _flag(name, value)]
    took = await cluster.deploy("suite", folder, "--replicas", "2", *flags)
    soak.say("the suite")
    url, log = f"http://127.0.0.1:{cluster.port}", cluster.folder / "suite.log"
    code, last = await run_tests(url, SUITE, "--deselect", NOT_OF_SEVERAL, log=log)
    both = Load(cluster.client)
    for number in range(16):
        await both.ask({**body(number, 2), "model": OPTIONS["served_model_name"][0], "stream": False})
    await cluster.stop("suite")
    target = "all tests pass with 2 replicas, and both answer"
    measured = f"{last}; {len(both.seen())} replicas answered; ready after {took:.0f} s"
    return Result("R-1", target, measured, code == 0 and len(both.seen()) == 2, "1 run")


def _flag(name: str, value: object) -> list[str]:
    dashed = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [dashed if value else f"--no-{dashed[2:]}"]
    return [text for each in (value if isinstance(value, list) else [value]) for text in (dashed, str(each))]


async def r2(soak: Soak, cluster: Cluster) -> Result:
    """kill -9 of a replica, or of the engine of one, under load."""
    await cluster.deploy("kill", soak.model, "--replicas", "2", *SMALL, *FAST_CHECKS)
    kills, back = soak.count(6), []
    async with loaded(cluster, 8, 48, streams=True) as load:
        for number in range(kills):
            soak.say(f"{number + 1} of {kills}")
            await _answers(load, 16)
            back.append(await _kill(load, is_engine=number % 3 == 2))
    await cluster.stop("kill")
    plain, streams = load.ends(streams=False), load.ends(streams=True)
    passed = not load.unfinished and streams["failed"] > 0
    target = "no plain request fails; streams end whole or with an error of their own"
    measured = (
        f"{plain['done']} of {plain.total()} plain requests answered; {streams['done']} streams whole, "
        f"{streams['failed']} with an error, {streams.total() - streams['done'] - streams['failed']} broken off; "
        f"{'; '.join(load.unfinished) or 'none lost'}; 2 replicas again after {max(back):.0f} s at most"
    )
    soak.details["R-2"] = {"plain": dict(plain), "streams": dict(streams), "seconds until 2 answered again": back}
    return Result("R-2", target, measured, passed, f"{kills} kills, of a replica or (every third) of its engine")


async def _kill(load: Load, *, is_engine: bool) -> float:
    """kill -9 of the oldest replica or its engine; the seconds until two replicas answer again."""
    before = set(replicas("kill"))
    victim, begin, when = min(before), time.monotonic(), time.perf_counter()
    os.kill(engine_of(victim) if is_engine else victim, signal.SIGKILL)
    if not is_engine:
        await _until(lambda: len(set(replicas("kill")) - before) >= 1, "a new replica")
    await _until(lambda: len(load.seen(when)) >= 2 and _fresh(load, when), "two replicas that answer")
    return time.monotonic() - begin


def _fresh(load: Load, moment: float) -> bool:
    """Whether enough requests began after a moment that both replicas must have had some."""
    return sum(each.begin > moment for each in load.answers) >= 32


async def r3(soak: Soak, cluster: Cluster) -> Result:
    """1 replica, 3 under load, 1 again, and no request fails."""
    scale = ("--min-replicas", "1", "--max-replicas", "3", "--target-ongoing", "4")
    delays = ("--upscale-delay", "1", "--downscale-delay", "5", "--shutdown-timeout", "60")
    await cluster.deploy("scale", soak.model, *scale, *delays, *SMALL)
    begin, first = time.monotonic(), len(replicas("scale"))
    async with loaded(cluster, 14, 32, streams=True) as high:
        soak.say("up")
        await _until(lambda: len(high.seen()) == 3, "three replicas that answer")
        up = time.monotonic() - begin
        await _answers(high, 100)
    begin = time.monotonic()
    async with loaded(cluster, 1, 32, streams=False) as low:
        soak.say("down")
        await until(lambda: len(replicas("scale")) == 1, "one replica", WAIT)
        down = time.monotonic() - begin
        await _answers(low, 4)
    await cluster.stop("scale")
    answers = high.answers + low.answers
    ends = Counter(each.outcome for each in answers)
    measured = f"{ends['done']} of {len(answers)} requests answered; 3 after {up:.0f} s, 1 after {down:.0f} s more"
    soak.details["R-3"] = {"ends": dict(ends), "seconds up": up, "seconds down": down}
    passed = first == 1 and ends.total() == ends["done"]
    return Result("R-3", "1 to 3 to 1 under load, no request fails", measured, passed, "1 run")


async def r4(soak: Soak, cluster: Cluster) -> Result:
    """The same name deployed again with other options, under load."""
    await cluster.deploy("update", soak.model, "--replicas", "2", *SMALL, "--shutdown-timeout", "60")
    async with loaded(cluster, 6, 32, streams=True) as load:
        await _answers(load, 20)
        old = load.seen()
        soak.say("updating")
        took = await cluster.deploy(
            "update", soak.model, "--replicas", "2", *SMALL, "--max-model-len", "4096", "--shutdown-timeout", "60"
        )
        when = time.perf_counter()
        await _until(lambda: len(load.seen(when)) == 2 and _fresh(load, when), "two new replicas")
        new = load.seen(max(each.end for each in load.answers) - 1)
    await cluster.stop("update")
    ends = Counter(each.outcome for each in load.answers)
    measured = f"{ends['done']} of {len(load.answers)} requests answered; new replicas after {took:.0f} s"
    passed = ends.total() == ends["done"] and not old & new
    return Result("R-4", "a rolling update under load, no request fails", measured, passed, "1 run")


async def r5(soak: Soak, cluster: Cluster) -> Result:
    """P95 of requests of mixed lengths. An application with each router runs; they are loaded in turn."""
    found: dict[str, list[float]] = {"least-loaded": [], "round-robin": []}
    for routing in found:
        await cluster.deploy(
            routing, soak.model, "--replicas", "2", "--routing", routing, "--root-path", f"/{routing}", *ONE_SLOT
        )
        await _latencies(cluster, routing, [SHORT] * 8)
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
    middle = ratios[len(ratios) // 2]
    measured = f"P95 {shown}; ratios {', '.join(f'{each:.2f}' for each in ratios)}"
    target = f"P95 below round-robin's (median of rounds): {LONG_SHARE:.0%} of {LONG} tokens, others of {SHORT}"
    runs = f"{ROUNDS} rounds of {count} requests, {CLIENTS} clients, 2 replicas that run one request at a time"
    return Result("R-5", target, measured, middle < 1, runs)


async def _latencies(cluster: Cluster, routing: str, lengths: list[int], first: int = 90_000) -> list[float]:
    """Seconds of each request; `CLIENTS` at once. first: so that no round has the prompts of another."""
    load, left = Load(cluster.client, path=f"/{routing}/v1/completions"), list(enumerate(lengths, first))

    async def ask_on() -> None:
        while left:
            number, length = left.pop(0)
            await load.ask(body(number, length) | {"stream": False})

    await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
    assert not load.unfinished, load.unfinished
    return [each.seconds for each in load.answers]


async def _answers(load: Load, more: int) -> None:
    """Wait for so many more answers."""
    goal = len(load.answers) + more
    await _until(lambda: len(load.answers) >= goal, f"{more} answers")


async def _until(condition: Callable[[], bool], what: str) -> float:
    return await until(condition, what, WAIT)


RAY_ROWS: Mapping[str, Callable[[Soak, Cluster], Awaitable[Result]]] = {
    "R-1": r1,
    "R-2": r2,
    "R-3": r3,
    "R-4": r4,
    "R-5": r5,
}
