"""The row of large bodies: legal ones, and legal ones with large answers, must not delay other clients."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from bench.soak.client import CHAT, COMPLETIONS, post
from bench.soak.leaks import sample
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import ROOT, Server, serving

LONGEST = 2 * 2**20 - 2**10  # bytes of a body
CLIENTS = 4
HEALTH_P99_MS = 250.0
MOST_GROWTH_MB = 150.0


def _filled(item: str) -> Any:
    """A list of this item (JSON) that fills a body."""
    return json.loads("[" + ",".join([item] * (LONGEST // (len(item) + 2) - 100)) + "]")


def bodies() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Name -> route and body, of up to two megabytes."""
    one, ids = {"max_tokens": 1}, {"prompt": [1] * 4000, "max_tokens": 1}
    said = {"role": "user", "content": "a"}
    deep = json.dumps({"role": "assistant", "content": "a", "tool_calls": None, "name": "b"})
    parts = said | {"content": _filled('{"type": "text", "text": "a"}')}
    words = "lorem ipsum dolor sit amet "
    return {
        "prompts of one token": (COMPLETIONS, one | {"prompt": _filled("[1]")}),
        "prompts of one letter": (COMPLETIONS, one | {"prompt": _filled('"a"')}),
        "one long prompt of tokens": (COMPLETIONS, one | {"prompt": _filled("1")}),
        "inputs of one token": ("/v1/embeddings", {"input": _filled("[1]")}),
        "tokens to text": ("/detokenize", {"tokens": _filled("65")}),
        "text to tokens": ("/tokenize", {"prompt": words * (LONGEST // len(words)), "return_token_strs": True}),
        "log-probabilities of a prompt": (COMPLETIONS, ids | {"prompt_logprobs": 20}),
        "the same, streamed": (COMPLETIONS, ids | {"prompt_logprobs": 20, "stream": True}),
        "echo of a prompt": (COMPLETIONS, ids | {"echo": True, "logprobs": 20}),
        "messages of one letter": (CHAT, one | {"messages": [said, *_filled(deep)]}),
        "parts of a message": (CHAT, one | {"messages": [parts]}),
        "variables of a template": (CHAT, one | {"messages": [said], "chat_template_kwargs": {"a": _filled("[]")}}),
        "escapes": (COMPLETIONS, one | {"prompt": _filled('"\\u00e9"')}),
        "stop strings": (COMPLETIONS, one | {"prompt": "a", "stop": _filled('"a"')}),
    }


async def attack(server: Server, name: str, request: bytes, seconds: float) -> dict[str, Any]:
    """Ask /health while clients keep sending a body; returns its milliseconds, and the server's memory."""
    command = (sys.executable, "-m", "bench.soak.probe", str(server.port), str(seconds))
    probe = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    memory: list[float] = []

    async def client() -> None:
        while probe.returncode is None:
            await server.ask(request)
            memory.append(sample(server.pid).rss_mb)

    clients = asyncio.gather(*(client() for _ in range(CLIENTS)))
    said, _ = await probe.communicate()
    await clients
    times = [1e3 * each for each in json.loads(said)]
    spread = {"p50": percentile(times, 50), "p99": percentile(times, 99), "longest": max(times)}
    return {"body": name, **spread, "sent": len(memory), "peak_mb": max(memory, default=0.0)}


async def l8(soak: Soak) -> Result:
    """Send every kind of body for some seconds."""
    requests = {name: post(path, body) for name, (path, body) in bodies().items()}
    async with serving(soak.small, "--max-num-seqs", "8", "--no-access-log") as server:
        for (
            request
        ) in requests.values():  # so that buffers and caches of every kind are allocated before the measurement
            await server.ask(request)
        await asyncio.sleep(1)
        begin, table = sample(server.pid).rss_mb, []
        for name, request in requests.items():
            soak.say(name)
            table.append(await attack(server, name, request, soak.seconds(5)))
        await asyncio.sleep(1)
        end = sample(server.pid).rss_mb
    soak.details["large bodies"] = table
    worst, longest, peak = (max(table, key=lambda each: each[name]) for name in ("p99", "longest", "peak_mb"))
    measured = (
        f"/health p99 {worst['p99']:.0f} ms at worst ({worst['body']}), longest {longest['longest']:.0f} ms; "
        f"memory {begin:.0f} MB, at most {peak['peak_mb']:.0f}, {end:.0f} at the end"
    )
    passed = worst["p99"] < HEALTH_P99_MS and end - begin < MOST_GROWTH_MB
    target = f"/health p99 < {HEALTH_P99_MS:g} ms; memory afterwards +< {MOST_GROWTH_MB:g} MB"
    return Result(target, measured, passed, f"{len(table)} bodies, {CLIENTS} clients")
