"""Rows of `scripts/soak --ray`: replicas on a real Ray cluster: deaths, scaling, updates, routing."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.soak.client import Answer, Client
from bench.soak.cluster import Cluster, engine_of, replicas
from bench.soak.load import body
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import ROOT, until

HEADER = "x-outpace-replica"
SMALL = ("--max-num-seqs", "4", "--no-access-log", "--template-processes", "1")
ONE_SLOT = ("--max-num-seqs", "1", *SMALL[2:])
"""A full batch in small: every request waits for the one that runs."""
FAST_CHECKS = ("--health-check-period", "1")
PATIENT = ("--shutdown-timeout", "60")
SUITE = "tests/server/test_openai_client.py"
NOT_OF_SEVERAL = f"{SUITE}::test_priority"
"""Urgent requests overtake those that wait at the same replica; the test fills only one."""
WAIT = 300.0  # seconds for replicas to come or go
LONG_SHARE = 0.04  # of the requests that compare routers. Below 5 %, so that P95 is of a short one
LONG, SHORT = 240, 8  # tokens
ROUNDS = 5  # with each router
CLIENTS = 8


@dataclass
class Load:
    """Requests of one or more clients, and their answers."""

    client: Client
    answers: list[Answer] = field(default_factory=list)
    path: str = "/v1/completions"

    def ends(self, *, streams: bool) -> Counter[str]:
        """How requests ended."""
        return Counter(each.outcome for each in self.answers if each.is_stream == streams)

    @property
    def unfinished(self) -> list[str]:
        """Plain requests without an answer, and streams that broke off without an error."""
        plain, streams = ({**self.ends(streams=each)} for each in (False, True))
        lost = [f"{count} {name}" for name, count in sorted(plain.items()) if name != "done"]
        broken = [(name, count) for name, count in sorted(streams.items()) if name not in ("done", "failed")]
        return lost + [f"{count} streams {name}" for name, count in broken]

    def seen(self, since: float = 0.0) -> set[str]:
        """Replicas whose answers ended after a moment of the performance clock."""
        return {each.headers[HEADER] for each in self.answers if each.end > since and HEADER in each.headers}

    def is_fresh(self, since: float) -> bool:
        """Whether two replicas answered since a moment, and enough requests began that both must have had some."""
        return len(self.seen(since)) >= 2 and sum(each.begin > since for each in self.answers) >= 32

    async def ask(self, fields: Mapping[str, Any]) -> None:
        """Send one request."""
        self.answers.append(await self.client.ask(fields, self.path, patience=WAIT))

    async def more(self, count: int) -> None:
        """Wait for that many more answers."""
        goal = len(self.answers) + count
        await until(lambda: len(self.answers) >= goal, f"{count} answers", WAIT)


@asynccontextmanager
async def loaded(cluster: Cluster, clients: int, tokens: int, *, streams: bool) -> AsyncIterator[Load]:
    """Clients that send requests until the end, and then get their answers. `streams`: every second client streams."""
    load, stopping, numbers = Load(cluster.client), asyncio.Event(), iter(range(1, 10**9))

    async def ask_on(index: int) -> None:
        while not stopping.is_set():
            await load.ask(body(next(numbers), tokens) | {"stream": streams and index % 2 == 1})

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
    command = (sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", SUITE)
    environment, log = {"OUTPACE_TEST_URL": f"http://127.0.0.1:{cluster.port}"}, cluster.folder / "suite.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--deselect", NOT_OF_SEVERAL), stdout=file, stderr=file, cwd=ROOT, env=os.environ | environment
        )
    code = await process.wait()
    both = Load(cluster.client)
    for number in range(16):
        await both.ask({**body(number, 2), "model": OPTIONS["served_model_name"][0], "stream": False})
    await cluster.stop("suite")
    last = log.read_text().strip().splitlines()[-1]
    measured = f"{last}; {len(both.seen())} replicas answered; ready after {took:.0f} s"
    passed = code == 0 and len(both.seen()) == 2
    return Result("R-1", "all tests pass with 2 replicas, and both answer", measured, passed, "1 run")


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
            await load.more(16)
            back.append(await _kill(load, is_engine=number % 3 == 2))
    await cluster.stop("kill")
    plain, streams = load.ends(streams=False), load.ends(streams=True)
    passed = not load.unfinished and streams["failed"] > 0
    measured = (
        f"{plain['done']} of {plain.total()} plain requests answered; {streams['done']} streams whole, "
        f"{streams['failed']} with an error, {streams.total() - streams['done'] - streams['failed']} broken off; "
        f"{'; '.join(load.unfinished) or 'none lost'}; 2 replicas again after {max(back):.0f} s at most"
    )
    soak.details["R-2"] = {"plain": dict(plain), "streams": dict(streams), "seconds until 2 answered again": back}
    target = "no plain request fails; streams end whole or with an error of their own"
    return Result("R-2", target, measured, passed, f"{kills} kills, of a replica or (every third) of its engine")


async def _kill(load: Load, *, is_engine: bool) -> float:
    """kill -9 of the oldest replica or its engine; the seconds until two replicas answer again."""
    before = set(replicas("kill"))
    victim, begin, when = min(before), time.monotonic(), time.perf_counter()
    os.kill(engine_of(victim) if is_engine else victim, signal.SIGKILL)
    if not is_engine:
        await until(lambda: bool(set(replicas("kill")) - before), "a new replica", WAIT)
    await until(lambda: load.is_fresh(when), "two replicas that answer", WAIT)
    return time.monotonic() - begin


async def r3(soak: Soak, cluster: Cluster) -> Result:
    """1 replica, 3 under load, 1 again, and no request fails."""
    scale = ("--min-replicas", "1", "--max-replicas", "3", "--target-ongoing", "4")
    delays = ("--upscale-delay", "1", "--downscale-delay", "5")
    await cluster.deploy("scale", soak.model, *scale, *delays, *PATIENT, *SMALL)
    first = len(replicas("scale"))
    async with loaded(cluster, 14, 32, streams=True) as high:
        soak.say("up")
        up = await until(lambda: len(high.seen()) == 3, "three replicas that answer", WAIT)
        await high.more(100)
    async with loaded(cluster, 1, 32, streams=False) as low:
        soak.say("down")
        down = await until(lambda: len(replicas("scale")) == 1, "one replica", WAIT)
        await low.more(4)
    await cluster.stop("scale")
    ends = Counter(each.outcome for each in high.answers + low.answers)
    soak.details["R-3"] = {"ends": dict(ends), "seconds up": up, "seconds down": down}
    measured = f"{ends['done']} of {ends.total()} requests answered; 3 after {up:.0f} s, 1 after {down:.0f} s more"
    passed = first == 1 and ends.total() == ends["done"]
    return Result("R-3", "1 to 3 to 1 under load, no request fails", measured, passed, "1 run")


async def r4(soak: Soak, cluster: Cluster) -> Result:
    """The same name deployed again with other options, under load."""
    flags = ("--replicas", "2", *SMALL, *PATIENT)
    await cluster.deploy("update", soak.model, *flags)
    async with loaded(cluster, 6, 32, streams=True) as load:
        await load.more(20)
        old = load.seen()
        soak.say("updating")
        took = await cluster.deploy("update", soak.model, *flags, "--max-model-len", "4096")
        when = time.perf_counter()
        await until(lambda: load.is_fresh(when) and len(load.seen(when)) == 2, "two new replicas", WAIT)
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
        flags = ("--replicas", "2", "--routing", routing, "--root-path", f"/{routing}", *ONE_SLOT)
        await cluster.deploy(routing, soak.model, *flags)
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
    measured = f"P95 {shown}; ratios {', '.join(f'{each:.2f}' for each in ratios)}"
    target = f"P95 below round-robin's (median of rounds): {LONG_SHARE:.0%} of {LONG} tokens, others of {SHORT}"
    runs = f"{ROUNDS} rounds of {count} requests, {CLIENTS} clients, 2 replicas that run one request at a time"
    return Result("R-5", target, measured, ratios[len(ratios) // 2] < 1, runs)


async def _latencies(cluster: Cluster, routing: str, lengths: list[int], first: int = 90_000) -> list[float]:
    """Seconds of each request, with `CLIENTS` in flight. first: so that no round repeats prompts of another."""
    load, left = Load(cluster.client, path=f"/{routing}/v1/completions"), list(enumerate(lengths, first))

    async def ask_on() -> None:
        while left:
            number, length = left.pop(0)
            await load.ask(body(number, length) | {"stream": False})

    await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
    assert not load.unfinished, load.unfinished
    return [each.seconds for each in load.answers]


RAY_ROWS: Mapping[str, Callable[[Soak, Cluster], Awaitable[Result]]] = {
    "R-1": r1,
    "R-2": r2,
    "R-3": r3,
    "R-4": r4,
    "R-5": r5,
}
