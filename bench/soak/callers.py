"""Rows of fairness: what one request, or one key, makes others wait."""

import asyncio
import itertools
import time
from typing import Any

from bench.soak.client import post
from bench.soak.load import body
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import Server, prompt, serving

LONG = 8000  # tokens of the text that becomes a vector
KEYS = ("first", "second")
PATIENCE = 120.0  # seconds


async def token_times(
    server: Server, asked: dict[str, Any], key: str | None = None, stop: asyncio.Event | None = None
) -> list[float]:
    """When each event of a stream came, from the start on; until its end, `stop` or no patience is left."""
    begin, found = time.perf_counter(), []
    reader, writer = await asyncio.open_connection("127.0.0.1", server.client.port)
    writer.write(post("/v1/completions", {**asked, "stream": True}, key=key))

    async def read() -> None:
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                found.append(time.perf_counter() - begin)

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(read())]
    if stop is not None:
        tasks.append(asyncio.create_task(stop.wait()))
    await asyncio.wait(tasks, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    writer.close()
    return found


def gaps(times: list[float]) -> list[float]:
    """Seconds between tokens."""
    return [after - before for before, after in itertools.pairwise(times)]


async def c1(soak: Soak) -> Result:
    """A text of 8,000 tokens becomes a vector beside a stream."""
    soak.say("a stream alone, and beside a vector")
    async with serving(soak.model) as server:
        alone = gaps(await token_times(server, body(0, 300)))
        stop = asyncio.Event()
        stream = asyncio.create_task(token_times(server, body(1, 6000), stop=stop))
        await asyncio.sleep(0.5)
        begin = time.perf_counter()
        answer = await server.client.ask({"input": [1] * LONG}, "/v1/embeddings")
        took = time.perf_counter() - begin
        await asyncio.sleep(0.2)
        stop.set()
        beside = gaps(await stream)
    longest, median = max(beside), percentile(alone, 50)
    measured = (
        f"vector after {took:.1f} s ({answer.status}); stream beside it: {len(beside)} tokens, longest gap "
        f"{1e3 * longest:.0f} ms, p99 {1e3 * percentile(beside, 99):.0f} ms; alone: median {1e3 * median:.1f} ms"
    )
    target = "the vector comes; no gap longer than 0.2 times the time of the vector"
    return Result("C-1", target, measured, answer.status == 200 and longest < 0.2 * took, f"{LONG} tokens")


async def c2(soak: Soak) -> Result:
    """Eight answers to one prompt in two slots that are taken, with requests behind them."""
    soak.say("n answers among later requests")

    async def took(server: Server, later: int) -> float:
        """Seconds of the eight answers: two requests are before them, so many after."""
        plain = [{**body(number, 64), "stream": False} for number in range(later + 2)]
        before = [asyncio.create_task(server.client.ask(asked)) for asked in plain[:2]]
        await asyncio.sleep(0.05)
        group = asyncio.create_task(server.client.ask({**body(99, 64), "stream": False, "n": 8}))
        await asyncio.sleep(0.05)
        after = [asyncio.create_task(server.client.ask(asked)) for asked in plain[2:]]
        answer = await group
        await asyncio.gather(*before, *after)
        return answer.seconds

    async with serving(soak.model, "--max-num-seqs", "2") as server:
        alone = await took(server, 0)
        crowded = await took(server, 20)
    ratio = crowded / alone
    measured = f"without others behind them {alone:.2f} s, before 20 later requests {crowded:.2f} s ({ratio:.2f} times)"
    return Result("C-2", "within 1.5 times what it takes without them", measured, ratio <= 1.5, "n = 8, 2 slots")


async def c4(soak: Soak) -> Result:
    """One key asks for 512 sequences, another for one."""
    soak.say("one key has 512 sequences")
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    many = {"prompt": [prompt(number) for number in range(32)], "n": 16, "max_tokens": 2000, "ignore_eos": True}
    async with serving(soak.model, "--max-num-seqs", "32", "--max-waiting", "1024", *flags) as server:
        alone = await token_times(server, body(1, 16), KEYS[1])
        stop = asyncio.Event()
        crowd = asyncio.create_task(token_times(server, many, KEYS[0], stop))
        await asyncio.sleep(3.0)
        beside = await token_times(server, body(2, 16), KEYS[1])
        stop.set()
        served = len(await crowd)
    first = beside[0] if beside else PATIENCE
    measured = (
        f"first token of the other key after {first:.2f} s (alone {alone[0]:.2f}), all 16 after "
        f"{beside[-1] if beside else PATIENCE:.2f} s (alone {alone[-1]:.2f}); the crowd had {served} tokens"
    )
    return Result("C-4", "first token < 2 s", measured, first < 2.0, "512 sequences against 1, 32 slots")
