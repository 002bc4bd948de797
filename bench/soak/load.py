"""Rows of load: overload, a burst, idle and slow clients, more demand than cache."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.soak.client import CHAT, COMPLETIONS, Answer, Client, post
from bench.soak.leaks import sample
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import Server, engine_of, is_free, serving, stat, until

Body = Mapping[str, Any]
SEQS, WAITING = 32, 256
MAIN = ("--max-num-seqs", str(SEQS), "--max-waiting", str(WAITING), "--keep-alive-timeout", "600")
"""Flags of the server that most rows share."""
IDLE, SLOW = 1000, 200
PATIENCE = 600.0  # timeout in seconds until the answers of slow clients are computed
KEPT = 4000  # most points of a plot


def prompt(number: int, length: int = 16) -> str:
    """A prompt of that many one-byte tokens, different for each number."""
    return (f"{number:06d} " + "lorem ipsum " * (length // 12 + 1))[:length]


def body(number: int, max_tokens: int = 32, **options: Any) -> dict[str, Any]:
    """A request different from all others; every other number is a stream."""
    asked = {"prompt": prompt(number), "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return asked | {"stream": number % 2 == 0} | options


def bodies_for(seconds: float, make: Callable[[int], Body] = body) -> Iterator[Body]:
    """Yield requests for some seconds."""
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, map(make, itertools.count()))


async def closed_loop(
    client: Client, clients: int, bodies: Iterator[Body], answers: list[Answer] | None = None, path: str = COMPLETIONS
) -> list[Answer]:
    """Each client sends one request after the other until there are no more; `answers` grows as they come."""
    found = [] if answers is None else answers

    async def one() -> None:
        for asked in bodies:
            found.append(await client.ask(asked, path))

    await asyncio.gather(*(one() for _ in range(clients)))
    return found


async def open_loop(
    client: Client, rate: float, seconds: float, max_tokens: int = 32, together: int = 1
) -> list[Answer]:
    """Requests at a rate, `together` of them at a time, whether or not earlier ones have ended; their answers."""
    begin, tasks = time.monotonic(), []
    for number in range(round(rate * seconds)):
        if number % together == 0:
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(client.ask(body(number, max_tokens))))
    return await asyncio.gather(*tasks)


async def warm_up(server: Server, seconds: float) -> None:
    """Make every part of the server allocate its buffers."""
    await closed_loop(server, 2 * SEQS, bodies_for(seconds))
    chats = [{"messages": [{"role": "user", "content": prompt(number)}], "max_tokens": 4} for number in range(64)]
    await asyncio.gather(*(server.ask(chat, CHAT) for chat in chats))


class Cores:
    """Cores that the processes use from now on: if the engine gets few, other programs use the machine."""

    def __init__(self, server: Server) -> None:
        self._pids = {"engine": engine_of(server.pid), "http": server.pid, "client": os.getpid()}
        self._begin, self._used = time.monotonic(), self._now()

    def _now(self) -> dict[str, float]:
        """CPU seconds of each process."""
        fields = {name: stat(pid) or ["0"] * 13 for name, pid in self._pids.items()}
        return {name: (int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for name, each in fields.items()}

    def __str__(self) -> str:
        took = time.monotonic() - self._begin
        return " + ".join(f"{name} {(used - self._used[name]) / took:.2f}" for name, used in self._now().items())


async def l2(soak: Soak, server: Server) -> Result:
    """Three times the capacity of the server."""
    soak.say("capacity")
    await closed_loop(server, 2 * SEQS, bodies_for(1.0))
    cores = Cores(server)
    answers = await closed_loop(server, 2 * SEQS, bodies_for(soak.seconds(20)))
    capacity = len(answers) / (max(answer.end for answer in answers) - min(answer.begin for answer in answers))
    took, at_capacity, cores = soak.seconds(120), str(cores), Cores(server)
    soak.say(f"overload, {took:.0f} s")
    answers = await open_loop(server, 3 * capacity, took)
    begin = min(answer.begin for answer in answers)
    done = [answer for answer in answers if answer.outcome == "done"]
    refused = [answer for answer in answers if answer.status == 429]
    goodput = sum(answer.end - begin <= took for answer in done) / took  # while requests came
    median, late = (percentile([answer.seconds for answer in refused], percent) for percent in (50, 99))
    first = percentile([answer.first - answer.begin for answer in done], 99)
    soak.details["overload"] = {"accepted": _points(done, begin), "rejected": _points(refused, begin)}
    patience = 1.5 * (SEQS + WAITING) / capacity
    passed = (
        goodput >= 0.9 * capacity
        and late < 0.1
        and all("retry-after" in answer.headers for answer in refused)
        and first < patience
        and len(done) + len(refused) == len(answers)
        and await server.is_ready()
    )
    measured = (
        f"capacity {capacity:.1f}/s, goodput {goodput:.1f}/s ({goodput / capacity:.0%}); {ends(answers)}; "
        f"429 p50 {1e3 * median:.0f} ms, p99 {1e3 * late:.0f} ms; "
        f"first byte of accepted p99 {first:.1f} s; cores at capacity: {at_capacity}, in overload: {cores}"
    )
    target = f"goodput >= 90 % of capacity; 429 with Retry-After, p99 < 100 ms; first byte < {patience:.0f} s; no 5xx"
    return Result(target, measured, passed, f"{took:.0f} s at 3x")


def _points(answers: Sequence[Answer], begin: float) -> list[list[float]]:
    """(send time, seconds until answered) of requests, thinned out."""
    some = answers[:: 1 + len(answers) // KEPT]
    return [[round(answer.begin - begin, 3), round(answer.seconds, 4)] for answer in some]


def ends(answers: Iterable[Answer]) -> dict[str, int]:
    """Number of requests by outcome."""
    return dict(Counter(answer.outcome for answer in answers))


async def l3(soak: Soak, server: Server) -> Result:
    """A burst."""
    count, begin = soak.count(2000), time.monotonic()
    answers = await open_loop(server, count, 1.0, max_tokens=16, together=20)
    spread = max(answer.begin for answer in answers) - min(answer.begin for answer in answers)
    passed = all((answer.outcome, answer.status) in (("done", 200), ("rejected", 429)) for answer in answers)
    measured = f"{ends(answers)}, sent in {spread:.1f} s, all answered after {time.monotonic() - begin:.1f} s"
    return Result("accepted + rejected = sent; 0 lost, 0 hung, 0 5xx", measured, passed, f"{count} requests")


@contextlib.asynccontextmanager
async def connections(
    server: Server, count: int, sent: bytes, *, buffer: int = 0
) -> AsyncIterator[list[socket.socket]]:
    """Sockets that have sent a request, perhaps with a small receive buffer."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setblocking(False)
            if buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            await loop.sock_connect(sock, ("127.0.0.1", server.port))
            await loop.sock_sendall(sock, sent)
        yield sockets


@contextlib.asynccontextmanager
async def slow_readers(server: Server, count: int, asked: Body) -> AsyncIterator[None]:
    """Clients that read one byte per second of their answers, and disconnect at the end."""

    async def sip(sockets: list[socket.socket]) -> None:
        while True:
            for sock in sockets:
                with contextlib.suppress(BlockingIOError):
                    sock.recv(1)
            await asyncio.sleep(1.0)

    async with connections(server, count, post(COMPLETIONS, asked, keep_alive=True), buffer=2048) as sockets:
        server.ledger.sent += count
        reading = asyncio.create_task(sip(sockets))
        yield
        reading.cancel()
    server.ledger.ends["cancelled"] += count


async def l4(soak: Soak, server: Server) -> Result:
    """Idle clients, and clients that read very slowly."""
    took, idle_count, slow_count = soak.seconds(15), soak.count(IDLE), soak.count(SLOW)

    async def p99() -> float:
        answers = await closed_loop(server, 8, bodies_for(took, lambda number: body(number, 16)))
        assert all(answer.outcome == "done" for answer in answers)
        return percentile([answer.seconds for answer in answers], 99)

    async def is_busy(wanted: bool) -> bool:
        found = await server.status()
        return bool(found["running"] or found["waiting"]) == wanted

    await closed_loop(server, 8, bodies_for(1.0))
    soak.say("alone")
    alone, before = await p99(), sample(server.pid).rss_mb
    soak.say("among idle and slow clients")
    get = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    asked = body(0, 400, logprobs=5, stream=True)
    async with connections(server, idle_count, get), slow_readers(server, slow_count, asked):
        await until(lambda: is_busy(True), "slow clients are answered")
        # computing these answers costs as much as any others, so it is not measured
        computed = await until(lambda: is_busy(False), "the answers of slow clients are computed", PATIENCE)
        among, more = await p99(), sample(server.pid).rss_mb - before
    passed = among < 1.5 * alone and more < 100 and await server.is_ready()
    measured = (
        f"p99 {1e3 * alone:.0f} ms alone, {1e3 * among:.0f} ms among them ({among / alone:.2f}x); "
        f"memory +{more:.0f} MB; slow answers were computed in {computed:.1f} s and wait"
    )
    runs = f"{idle_count} idle + {slow_count} slow, {took:.0f} s"
    return Result("p99 of others < 1.5x; memory of the HTTP process +< 100 MB", measured, passed, runs)


async def l6(soak: Soak) -> Result:
    """More demand than cache: 40 requests that need 10 pages each, and 40 pages in all."""
    count = 40
    bodies = [body(number, 120, prompt=prompt(number, 40)) for number in range(count)]
    flags = ("--num-blocks", "40", "--block-size", "16", "--max-num-seqs", "32", "--deterministic")
    async with serving(soak.model, *flags) as server:
        soak.say("each alone")
        alone = [await server.ask(each) for each in bodies]
        soak.say("all together")
        together = await asyncio.gather(*map(server.ask, bodies))
        status, _ = await server.idle()
    same = sum(one.text == other.text for one, other in zip(together, alone, strict=True))
    done = sum(answer.outcome == "done" for answer in together)
    passed = done == same == count and status["preemptions"] > 0 and is_free(status)
    measured = (
        f"{ends(together)}, {same} the same as alone, {status['preemptions']} preemptions, "
        f"{status['free_blocks']} of {status['num_blocks']} pages free"
    )
    return Result("every request ends with the tokens it has alone; no page lost", measured, passed, "10x cache")
