"""Load on a server: sends requests at a rate or with a concurrency limit, and notes when each event came."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outpace.bench.figures import Run, Trace
from outpace.bench.http import Pool

Watch = Callable[[int], None]
"""Called with the number of requests that have ended."""

_SHOWN = 300  # bytes of an error body


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_tokens(self) -> bool:
        """The first event of a chat names only the role; every event of a completion has tokens."""
        if self.delta is None:
            return self.text is not None
        return bool(self.delta.content or self.delta.reasoning_content)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Reader:
    """Reads the events of a stream into a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rest = b""
        self.first = b""
        """The beginning of the body, for error messages."""
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def receive(self, data: bytes) -> None:
        """Read a piece of the body: any number of events, perhaps cut anywhere."""
        now = time.perf_counter()
        if len(self.first) < _SHOWN:
            self.first += data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._read(event, now)

    def _read(self, event: bytes, now: float) -> None:
        trace = self._trace
        try:
            chunk = self._decode(event)
        except msgspec.DecodeError as error:
            trace.error = f"an event does not have OpenAI's format: {error}"
            return
        if chunk.error is not None:
            trace.error = str(chunk.error)[:300]
        if any(choice.has_tokens for choice in chunk.choices):
            trace.times.append(now)
        if chunk.usage is not None:
            trace.prompt_tokens, trace.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens


@dataclass(frozen=True)
class Request:
    """One request to send."""

    body: bytes
    prompt_tokens: int


def make_request(
    endpoint: str, model: str, prompt: list[int] | str, output_len: int, extra: Mapping[str, Any]
) -> Request:
    """A streamed request for that many tokens, with the usage in the last event."""
    asked: dict[str, Any] = {"model": model, "max_tokens": output_len, "temperature": 0.0, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    if endpoint == "chat":
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return Request(msgspec.json.encode({**asked, **extra}), length)


@dataclass(frozen=True)
class Pace:
    """When requests are sent."""

    rate: float = float("inf")
    """Requests per second; inf: all at once."""
    arrival: str = "poisson"
    """poisson, or fixed: at equal intervals."""
    max_concurrency: int | None = None
    """Most requests in flight; later ones wait."""

    def times(self, count: int, seed: int) -> Iterator[float]:
        """The send time of each request, in seconds from the start."""
        if self.rate == float("inf"):
            yield from [0.0] * count
            return
        draw, due = random.Random(seed), 0.0
        for number in range(count):
            yield due if self.arrival == "poisson" else number / self.rate
            due += draw.expovariate(self.rate)


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    base: str
    """http://host:port/v1"""
    endpoint: str = "completions"
    """Or chat."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    """Seconds per request."""

    @property
    def path(self) -> str:
        """The route, relative to the base."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"


async def load(
    target: Target, requests: Sequence[Request], pace: Pace, seed: int, watch: Watch | None = None
) -> Run[Trace]:
    """Send requests at a pace, and wait for all answers."""
    pool, ended = Pool(target.base, dict(target.headers)), 0
    slots = asyncio.Semaphore(pace.max_concurrency or len(requests) or 1)
    begin = time.perf_counter()

    async def one(request: Request, due: float) -> Trace:
        nonlocal ended
        if due:
            await asyncio.sleep(begin + due - time.perf_counter())
        async with slots:
            trace = await _send(pool, target, request)
        ended += 1
        if watch is not None:
            watch(ended)
        return trace

    try:
        dues = pace.times(len(requests), seed)
        traces = await asyncio.gather(*(one(request, due) for request, due in zip(requests, dues, strict=True)))
    finally:
        pool.close()
    return Run(traces, max((trace.end for trace in traces), default=begin) - begin)


async def _send(pool: Pool, target: Target, request: Request) -> Trace:
    """Send one request; an error is noted in its trace."""
    trace = Trace(time.perf_counter(), request.prompt_tokens)
    reader = Reader(trace)
    try:
        async with asyncio.timeout(target.timeout):
            status = await pool.post(target.path, request.body, reader.receive)
        if status != 200:
            trace.error = f"{status}: {reader.first[:_SHOWN].decode(errors='replace')}"
        elif not trace.times:
            trace.error = trace.error or "the answer has no tokens"
    except TimeoutError:
        trace.error = f"no answer within {target.timeout:g} s"
    except OSError as error:
        trace.error = f"{type(error).__name__}: {error}"
    trace.end = time.perf_counter()
    trace.output_tokens = trace.output_tokens or len(trace.times)  # not every server sends usage
    return trace
