"""Rows of fairness: how long others wait for one large request, or for one API key."""

import asyncio
import itertools

from bench.soak.load import body, prompt
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import Server, serving

LONG = 8000  # tokens of the text that is embedded
KEYS = ("first", "second")


def gaps(times: list[float]) -> list[float]:
    """Seconds between tokens."""
    return [after - before for before, after in itertools.pairwise(times)]


async def c1(soak: Soak) -> Result:
    """A text of 8,000 tokens is embedded beside a stream."""
    soak.say("a stream alone, and beside an embedding")
    async with serving(soak.model) as server:
        alone = gaps((await server.ask(body(0, 300))).times)
        stream = await server.send(body(1, 6000, stream=True))
        await asyncio.sleep(0.5)
        answer = await server.ask({"input": [1] * LONG}, "/v1/embeddings")
        await asyncio.sleep(0.2)
        stream.leave()
        beside = gaps((await server.receive(stream)).times)
    longest, took = max(beside), answer.seconds
    measured = (
        f"vector after {took:.1f} s ({answer.status}); stream beside it: {len(beside)} tokens, longest gap "
        f"{1e3 * longest:.0f} ms, p99 {1e3 * percentile(beside, 99):.0f} ms; alone: median "
        f"{1e3 * percentile(alone, 50):.1f} ms"
    )
    target = "the vector comes; no gap longer than 0.2 times the time of the vector"
    return Result(target, measured, answer.status == 200 and longest < 0.2 * took, f"{LONG} tokens")


async def c2(soak: Soak) -> Result:
    """Eight answers to one prompt while both slots are taken, with later requests in the queue."""
    soak.say("n answers among later requests")

    async def took(server: Server, later: int) -> float:
        """Seconds of the eight answers: two requests are before them, `later` requests after them."""
        plain = [body(number, 64, stream=False) for number in range(later + 2)]
        exchanges = []
        for group in (plain[:2], [body(99, 64, stream=False, n=8)], plain[2:]):
            exchanges += [await server.send(asked) for asked in group]
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*map(server.receive, exchanges))
        return answers[2].seconds

    async with serving(soak.model, "--max-num-seqs", "2") as server:
        alone, crowded = await took(server, 0), await took(server, 20)
    ratio = crowded / alone
    measured = f"without later requests {alone:.2f} s, with 20 of them {crowded:.2f} s ({ratio:.2f} times)"
    return Result("at most 1.5 times the seconds without later requests", measured, ratio <= 1.5, "n = 8, 2 slots")


async def c4(soak: Soak) -> Result:
    """One API key requests 512 sequences, another one requests one."""
    soak.say("one key has 512 sequences")
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    many = body(0, 2000, prompt=[prompt(number) for number in range(32)], n=16, temperature=1.0)
    async with serving(soak.model, "--max-num-seqs", "32", "--max-waiting", "1024", *flags) as server:
        alone = (await server.ask(body(2, 16), key=KEYS[1])).times
        crowd = await server.send(many, key=KEYS[0])
        await asyncio.sleep(3.0)
        beside = (await server.ask(body(4, 16), key=KEYS[1])).times or [server.patience]
        crowd.leave()
        served = len((await server.receive(crowd)).times)
    measured = (
        f"first token of the other key after {beside[0]:.2f} s (alone {alone[0]:.2f}), all 16 after "
        f"{beside[-1]:.2f} s (alone {alone[-1]:.2f}); the crowd had {served} tokens"
    )
    return Result("first token < 2 s", measured, beside[0] < 2.0, "512 sequences against 1, 32 slots")
