"""Rows of fairness: how long one request, or one key, makes others wait."""

import asyncio
import itertools
from typing import Any

from bench.soak.load import body
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import Server, prompt, serving

LONG = 8000  # tokens of the text that is embedded
KEYS = ("first", "second")
PATIENCE = 120.0  # seconds


async def token_times(
    server: Server, asked: dict[str, Any], key: str | None = None, stop: asyncio.Event | None = None
) -> list[float]:
    """When each event of a stream came, in seconds from its start; the client leaves at `stop` or after a timeout."""
    exchange = await server.client.open({**asked, "stream": True}, key=key)
    ends: list[asyncio.Future[Any]] = [exchange.ended]
    if stop is not None:
        ends.append(asyncio.ensure_future(stop.wait()))
    await asyncio.wait(ends, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    exchange.leave()
    return (await server.client.close(exchange)).times


def gaps(times: list[float]) -> list[float]:
    """Seconds between tokens."""
    return [after - before for before, after in itertools.pairwise(times)]


async def c1(soak: Soak) -> Result:
    """A text of 8,000 tokens is embedded beside a stream."""
    soak.say("a stream alone, and beside an embedding")
    async with serving(soak.model) as server:
        alone = gaps(await token_times(server, body(0, 300)))
        stop = asyncio.Event()
        stream = asyncio.create_task(token_times(server, body(1, 6000), stop=stop))
        await asyncio.sleep(0.5)
        answer = await server.client.ask({"input": [1] * LONG}, "/v1/embeddings")
        await asyncio.sleep(0.2)
        stop.set()
        beside = gaps(await stream)
    longest, took = max(beside), answer.seconds
    measured = (
        f"vector after {took:.1f} s ({answer.status}); stream beside it: {len(beside)} tokens, longest gap "
        f"{1e3 * longest:.0f} ms, p99 {1e3 * percentile(beside, 99):.0f} ms; alone: median "
        f"{1e3 * percentile(alone, 50):.1f} ms"
    )
    target = "the vector comes; no gap longer than 0.2 times the time of the vector"
    return Result("C-1", target, measured, answer.status == 200 and longest < 0.2 * took, f"{LONG} tokens")


async def c2(soak: Soak) -> Result:
    """Eight answers to one prompt in two slots that are taken, with requests waiting behind them."""
    soak.say("n answers among later requests")

    async def took(server: Server, later: int) -> float:
        """Seconds of the eight answers: two requests are before them, `later` requests after them."""
        plain = [{**body(number, 64), "stream": False} for number in range(later + 2)]
        tasks = []
        for group in (plain[:2], [{**body(99, 64), "stream": False, "n": 8}], plain[2:]):
            tasks.append([asyncio.create_task(server.client.ask(asked)) for asked in group])
            await asyncio.sleep(0.05)
        _, (answer,), _ = [await asyncio.gather(*group) for group in tasks]
        return answer.seconds

    async with serving(soak.model, "--max-num-seqs", "2") as server:
        alone, crowded = await took(server, 0), await took(server, 20)
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
        beside = await token_times(server, body(2, 16), KEYS[1]) or [PATIENCE]
        stop.set()
        served = len(await crowd)
    measured = (
        f"first token of the other key after {beside[0]:.2f} s (alone {alone[0]:.2f}), all 16 after "
        f"{beside[-1]:.2f} s (alone {alone[-1]:.2f}); the crowd had {served} tokens"
    )
    return Result("C-4", "first token < 2 s", measured, beside[0] < 2.0, "512 sequences against 1, 32 slots")
