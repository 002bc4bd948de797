"""Load on a server: requests sent at a rate or so many at a time, and when each piece of their answers came."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from outpace.bench.http import Pool

Endpoint = Literal["completions", "chat"]
Arrival = Literal["poisson", "fixed"]
Watch = Callable[[int], None]
"""Told how many requests have ended."""

_SHOWN = 300  # bytes of an error body


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Trace:
    """One request: when it was sent and when its pieces came, in seconds of a monotonic clock."""

    start: float
    prompt_tokens: int
    """What was asked, until the server says how it counts."""
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    error: str = ""
    counted: bool = False
    """Whether the server said how many tokens there were."""

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds to the last piece."""
        return self.times[-1] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds of a token but the first; None: there is only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Reader:
    """Reads the events of a stream into a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rest = b""
        self.first = b""
        """How the body begins, for errors."""
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def receive(self, data: bytes) -> None:
        """A piece of the body, perhaps with several events or a part of one."""
        now = time.perf_counter()
        if len(self.first) < _SHOWN:
            self.first += data
        *events, self._rest = (self._rest + data).split(b"\n")
        for line in events:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        trace = self._trace
        try:
            chunk = self._decode(data)
        except msgspec.DecodeError as error:
            trace.error = f"an event is not as OpenAI's are: {error}"
            return
        if chunk.error is not None:
            trace.error = str(chunk.error)[:300]
        if any(_is_token(choice) for choice in chunk.choices):
            trace.times.append(now)
        if chunk.usage is not None:
            trace.prompt_tokens, trace.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            trace.counted = True


def _is_token(choice: _Choice) -> bool:
    """A completion's pieces all count; a chat's first one, which names the role alone, does not."""
    if choice.delta is None:
        return choice.text is not None
    return bool(choice.delta.content or choice.delta.reasoning_content)


@dataclass(frozen=True)
class Request:
    """One request to send."""

    body: bytes
    prompt_tokens: int


def make_request(
    endpoint: Endpoint, model: str, prompt: list[int] | str, output_len: int, extra: Mapping[str, Any]
) -> Request:
    """A request for so many tokens, streamed, with the usage at the end."""
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
    """Requests a second; inf: all at once."""
    arrival: Arrival = "poisson"
    max_concurrency: int | None = None
    """Most requests in flight; those that are due wait."""

    def times(self, count: int, seed: int) -> Iterator[float]:
        """Seconds from the beginning at which requests are due."""
        if self.rate == float("inf"):
            yield from [0.0] * count
            return
        draw, due = random.Random(seed), 0.0
        for number in range(count):
            yield due if self.arrival == "poisson" else number / self.rate
            due += draw.expovariate(self.rate)


@dataclass(frozen=True)
class Load:
    """What came of the requests, and the seconds they took together."""

    traces: list[Trace]
    seconds: float


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    base: str
    """http://host:port/v1"""
    endpoint: Endpoint = "completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    """Seconds for one request."""

    @property
    def path(self) -> str:
        """Of the route, under the base."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"


async def load(target: Target, requests: Sequence[Request], pace: Pace, seed: int, watch: Watch | None = None) -> Load:
    """Send requests at a pace, and wait for all answers."""
    pool, ended = Pool(target.base, dict(target.headers)), 0
    places = asyncio.Semaphore(pace.max_concurrency or len(requests) or 1)
    begin = time.perf_counter()

    async def one(request: Request, due: float) -> Trace:
        nonlocal ended
        if due:
            await asyncio.sleep(begin + due - time.perf_counter())
        async with places:
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
    return Load(traces, max((trace.end for trace in traces), default=begin) - begin)


async def _send(pool: Pool, target: Target, request: Request) -> Trace:
    """One request; what goes wrong with it is in its trace."""
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
    if not trace.counted:
        trace.output_tokens = len(trace.times)
    return trace
