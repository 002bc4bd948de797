"""Rows about lost data: streams must equal plain answers, and client and server must count the same."""

import asyncio
import json
import random
from typing import Any

from bench.soak.client import CHAT, COMPLETIONS, Answer
from bench.soak.load import prompt
from bench.soak.row import Result, Soak
from bench.soak.server import Server, serving

STREAMS_EACH = 10  # streams that are compared with one plain answer


def random_request(draw: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body, with options that change how an answer is split into events."""
    asked: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "n": draw.choice((1, 1, 1, 2))}
    asked |= draw.choice(({"temperature": 0.0}, {"temperature": 1.0, "seed": number}))
    if draw.random() < 0.3:
        asked["stop"] = draw.sample(["a", "e", "q", "zz", "\n", "�"], 2)
    if draw.random() < 0.5:
        asked["ignore_eos"] = True
    if draw.random() < 0.5:
        return CHAT, asked | {"messages": [{"role": "user", "content": prompt(number)}]}
    if draw.random() < 0.2:
        asked["echo"] = True
    return COMPLETIONS, asked | {"prompt": prompt(number)}


def differences(plain: Answer, stream: Answer) -> list[str]:
    """How a stream differs from the plain answer to the same request; empty: it does not."""
    if plain.outcome != "done" or stream.outcome != "done":
        return [f"{plain.outcome} {plain.status} and {stream.outcome} {stream.status}: {stream.body[:200]!r}"]
    whole, events, found = json.loads(plain.body), stream.events, []
    usages = [event["usage"] for event in events if event.get("usage")]
    if usages != [whole["usage"]]:
        found.append(f"usage {usages} is not {whole['usage']}")
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        text, joined = _text(choice), "".join(map(_text, parts))
        if joined != text:
            found.append(f"text {joined!r} is not {text!r}")
        reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
        if reasons != [choice["finish_reason"]]:
            found.append(f"finish reasons {reasons} are not one {choice['finish_reason']}")
    if stream.body.count(b"data: [DONE]\n") != 1 or not stream.body.rstrip().endswith(b"data: [DONE]"):
        found.append("[DONE] is not there once, at the end")
    return found


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta")
    return str(choice.get("text") or "") if part is None else str(part.get("content") or "")


async def n2(soak: Soak) -> Result:
    """Random requests, each sent once plainly and several times as a stream, all at once."""
    total, slots, right, wrong = soak.count(10_000), asyncio.Semaphore(6), 0, list[str]()

    async def group(server: Server, number: int, size: int) -> None:
        nonlocal right
        async with slots:
            path, asked = random_request(random.Random(number), number)
            streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
            plain, *streams = await asyncio.gather(*(server.ask(each, path) for each in (asked, *[streamed] * size)))
            for stream in streams:
                found = differences(plain, stream)
                right += not found
                wrong.extend(f"{path} {asked}: {each}" for each in found)
            soak.say(f"{right} of {total}")

    sizes = [min(STREAMS_EACH, total - first) for first in range(0, total, STREAMS_EACH)]
    async with serving(soak.small, "--deterministic") as server:
        await asyncio.gather(*(group(server, number, size) for number, size in enumerate(sizes)))
    soak.details["wrong streams"] = wrong[:20]
    measured = f"{right}/{total} equal" + (f"; first: {wrong[0][:200]}" if wrong else "")
    return Result("stream = plain answer, one finish reason, one [DONE]", measured, right == total, f"{total}")


async def n1(server: Server) -> Result:
    """The client's ledger against the server's counters, over all rows of the shared server."""
    _, counted = await server.idle()
    ledger = server.ledger
    measured = f"client: {ledger.sent} sent, {dict(ledger.ends)}; server: {counted}"
    target = "sent = done + rejected + cancelled + failed, exactly, on both sides"
    return Result(target, measured, ledger.agrees(counted), f"{ledger.sent} requests")
