"""The row of large bodies: legal ones, and legal ones with large answers, must not delay anybody else."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.soak.client import post
from bench.soak.leaks import sample
from bench.soak.row import Result, Soak, percentile
from bench.soak.server import ROOT, Server, serving

LONGEST = 2 * 2**20 - 2**10  # bytes of a body
CLIENTS = 4
HEALTH_P99_MS = 250.0
MOST_GROWTH_MB = 150.0
TEXT = "lorem ipsum dolor sit amet "


def _filled(item: str) -> Any:
    """A list with as many of an item (JSON) as a body takes."""
    return json.loads("[" + ",".join([item] * (LONGEST // (len(item) + 2) - 100)) + "]")


def _chat(item: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, *_filled(item)], "max_tokens": 1}


def bodies() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """A name -> a route and a body of up to two megabytes."""
    ids = {"prompt": [1] * 4000, "max_tokens": 1}
    deep = json.dumps({"role": "assistant", "content": "a", "tool_calls": None, "name": "b"})
    return {
        "prompts of one token": ("/v1/completions", {"prompt": _filled("[1]"), "max_tokens": 1}),
        "prompts of one letter": ("/v1/completions", {"prompt": _filled('"a"'), "max_tokens": 1}),
        "one long prompt of tokens": ("/v1/completions", {"prompt": _filled("1"), "max_tokens": 1}),
        "inputs of one token": ("/v1/embeddings", {"input": _filled("[1]")}),
        "tokens to text": ("/detokenize", {"tokens": _filled("65")}),
        "text to tokens": (
            "/tokenize",
            {"prompt": TEXT * (LONGEST // len(TEXT)), "return_token_strs": True},
        ),
        "log-probabilities of a prompt": ("/v1/completions", ids | {"prompt_logprobs": 20}),
        "the same, streamed": ("/v1/completions", ids | {"prompt_logprobs": 20, "stream": True}),
        "echo of a prompt": ("/v1/completions", ids | {"echo": True, "logprobs": 20}),
        "messages of one letter": ("/v1/chat/completions", _chat(deep)),
        "parts of a message": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": _filled('{"type": "text", "text": "a"}')}], "max_tokens": 1},
        ),
        "variables of a template": (
            "/v1/chat/completions",
            _chat("[]")
            | {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": _filled("[]")}},
        ),
        "escapes": ("/v1/completions", {"prompt": _filled('"\\u00e9"'), "max_tokens": 1}),
        "stop strings": ("/v1/completions", {"prompt": "a", "stop": _filled('"a"'), "max_tokens": 1}),
    }


@dataclass(frozen=True)
class Figures:
    """How long /health took, in milliseconds, while clients sent a body; and the server's memory at its most."""

    body: str
    p50: float
    p99: float
    longest: float
    sent: int
    peak_mb: float


def rss_mb(server: Server) -> float:
    """Memory of the HTTP process."""
    found = sample(server.pid, time.monotonic())
    assert found is not None, "the server is gone"
    return found.rss_mb


async def attack(server: Server, name: str, request: bytes, seconds: float) -> Figures:
    """Ask /health while clients send a body over and over."""
    command = (sys.executable, "-m", "bench.soak.probe", str(server.client.port), str(seconds))
    probe = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    sent, peak = 0, 0.0

    async def client() -> None:
        nonlocal sent, peak
        while probe.returncode is None:
            await server.client.send(request)
            sent, peak = sent + 1, max(peak, rss_mb(server))

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    said, _ = await probe.communicate()
    await asyncio.gather(*clients)
    times = [1e3 * each for each in json.loads(said)]
    return Figures(name, percentile(times, 50), percentile(times, 99), max(times), sent, peak)


async def l8(soak: Soak) -> Result:
    """Every kind of body for some seconds."""
    requests = {name: post(path, body) for name, (path, body) in bodies().items()}
    async with serving(soak.small, "--max-num-seqs", "8", "--no-access-log") as server:
        for request in requests.values():  # what every kind keeps once: buffers, texts of tokens
            await server.client.send(request)
        await asyncio.sleep(1)
        begin, table = rss_mb(server), []
        for name, request in requests.items():
            soak.say(name)
            table.append(await attack(server, name, request, soak.seconds(5)))
        await asyncio.sleep(1)
        end = rss_mb(server)
    soak.details["large bodies"] = [asdict(each) for each in table]
    worst, longest = max(table, key=lambda each: each.p99), max(each.longest for each in table)
    measured = (
        f"/health p99 {worst.p99:.0f} ms at worst ({worst.body}), longest {longest:.0f} ms; "
        f"memory {begin:.0f} MB, at most {max(each.peak_mb for each in table):.0f}, {end:.0f} at the end"
    )
    passed = worst.p99 < HEALTH_P99_MS and end - begin < MOST_GROWTH_MB
    target = f"/health p99 < {HEALTH_P99_MS:g} ms; memory afterwards +< {MOST_GROWTH_MB:g} MB"
    return Result("L-8", target, measured, passed, f"{len(table)} bodies, {CLIENTS} clients")
