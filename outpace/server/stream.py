"""One generator of events for each request; plain JSON and server-sent events are two ways to write them down."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.errors import InputError
from outpace.server.big_jobs import BigJobs
from outpace.server.engine import Delta, Engine, EngineDead, EngineRequest
from outpace.server.gone import until_gone
from outpace.server.problems import DONE
from outpace.server.tokens import Tokens
from outpace.server.validate import Work
from outpace.structure import FIELD, StructureCheck
from outpace.tokenizer import Detokenizer
from outpace.types import FinishReason, SamplingParams, TokenLogprobs

PING = b": ping\n\n"
_MANY = 1024  # log-probabilities; writing them takes milliseconds
_AHEAD = 16  # events of one prompt that wait for a slow reader while others are read
Result = TypeVar("Result")


@dataclass(slots=True)
class Event:
    """What is new of one answer."""

    prompt: int
    """Which of the prompts."""
    index: int
    """Which of all answers of the request."""
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """In the first event of a prompt, if asked for."""
    params: SamplingParams | None = None
    """In the first event of a prompt."""
    times: tuple[float, float] | None = None
    """In the first event of a prompt, as in `Delta`."""
    num_cached_tokens: int | None = None
    """The same."""
    check: StructureCheck | None = None
    """In the last event of an answer that is whole, where its grammar does not enforce all that was asked."""


class _Answer:
    """Tokens of one answer become text here, up to a stop string."""

    def __init__(self, work: Work, tokens: Tokens, prompt: int, index: int) -> None:
        params = work.params
        self._text = Detokenizer(
            tokens.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            prompt_token_ids=work.prompt_token_ids,
        )
        self._prompt, self._index = prompt, index
        self._check = work.grammar.check if work.grammar is not None else None
        self._said: list[str] = []  # all its text, where it is to be checked
        self.finished = False

    def take(self, delta: Delta) -> Event:
        """The event that a delta makes; tokens behind a stop string are dropped."""
        used, reason, stop = 0, delta.finish_reason, delta.stop_reason
        found: int | str | None = stop
        for token in delta.token_ids:
            self._text.add(token)
            used += 1
            if self._text.stopped:
                reason, found = FinishReason.STOP, self._text.stop_reason
                break
        if reason is not None:
            self.finished = True
            self._text.finish()
            if self._text.stopped:
                reason, found = FinishReason.STOP, self._text.stop_reason
        logprobs = delta.logprobs[:used] if delta.logprobs is not None else None
        return Event(
            *(self._prompt, self._index, self._text.take(), delta.token_ids[:used], logprobs, reason, found),
            prompt_logprobs=delta.prompt_logprobs,
            times=delta.times,
            num_cached_tokens=delta.num_cached_tokens,
        )

    async def check(self, event: Event) -> None:
        """Check the answer, if this is its last event and the grammar does not enforce all that was asked."""
        if self._check is not None:
            self._said.append(event.text)
            if event.finish_reason is FinishReason.STOP:
                event.check = await asyncio.to_thread(self._check, "".join(self._said))


async def events_of(
    engine: Engine, work: Work, tokens: Tokens, request: EngineRequest, prompt: int = 0
) -> AsyncGenerator[Event, None]:
    """The events of one prompt. The engine ends an answer as soon as its text has met a stop string."""
    count, params = work.params.n, [work.params]
    answers = [_Answer(work, tokens, prompt, prompt * count + number) for number in range(count)]
    async with aclosing(_by_field(engine.generate(request), work.structure)) as deltas:
        async for delta in deltas:
            answer = answers[delta.index]
            if answer.finished:
                continue  # it met a stop string, and the engine did not know yet
            event = answer.take(delta)
            await answer.check(event)
            if params:
                event.params = params.pop()
            if event.finish_reason is not None and delta.finish_reason is None:
                request.unwanted.add(delta.index)
            yield event
            if all(answer.finished for answer in answers):
                return
    raise EngineDead("the engine left a request unanswered")


async def _by_field(deltas: AsyncGenerator[Delta, None], field: str) -> AsyncGenerator[Delta, None]:
    """The same deltas; an error of the structure of the answer names the field that asked for it."""
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta
    except InputError as error:
        said = str(error)
        raise InputError(said.replace(FIELD, field, 1) if field and said.startswith(FIELD) else said) from None


async def events_of_all(
    engine: Engine, works: Sequence[Work], tokens: Tokens, request_id: str
) -> AsyncGenerator[Event, None]:
    """The events of several prompts as they come; an error of one ends all. There is room for all, or none begins."""
    requests = [work.request(f"{request_id}-{number}") for number, work in enumerate(works)]
    sources = [
        events_of(engine, work, tokens, request, number)
        for number, (work, request) in enumerate(zip(works, requests, strict=True))
    ]
    merged = sources[0] if len(sources) == 1 else _merge(sources)
    room = nullcontext() if len(sources) == 1 else engine.room(requests)
    with room:
        async with aclosing(merged):
            async for event in merged:
                yield event


async def _merge(sources: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    waiting: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_AHEAD * len(sources))

    async def pump(source: AsyncGenerator[Event, None]) -> None:
        last: BaseException | None = None
        try:
            async with aclosing(source):
                async for event in source:
                    await waiting.put(event)
        except Exception as error:
            last = error
        await waiting.put(last)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Writer(Protocol):
    """How a route writes its answers: the same chunks are sent one by one, or put together."""

    of_prompt: int
    """Log-probabilities of the prompt that stand in the first chunk of an answer."""

    def chunks(self, event: Event) -> list[Any]:
        """What an event adds, as the route writes it; nothing for an event that shows nothing yet."""

    def last_chunks(self) -> list[Any]:
        """What stands behind all events of a stream."""

    def whole(self, chunks: Sequence[Any]) -> Any:
        """The answer that these chunks are the pieces of."""


class Reply(Response):
    """Answers a request as events or as JSON, and gives it up as soon as the client is gone.

    A stream begins with its first event, or with a ping if that takes long: what goes wrong before has a status code of
    its own. What goes wrong after it is raised, too, and becomes the stream's last event where every error becomes an
    answer (`guard.Guard`).
    """

    def __init__(self, events: AsyncGenerator[Event, None], writer: Writer, *, stream: bool) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._events, self._writer, self._stream = events, writer, stream
        self._started, self._sent_at = False, 0.0
        self._begun: set[int] = set()  # answers
        self._entries = 0  # tokens and log-probabilities so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer."""
        state = scope["app"].state
        period, jobs = state.options.sse_ping_seconds, state.serving.answers
        writing = self._write_stream(send, jobs, period) if self._stream else self._write_json(send, jobs)
        async with aclosing(self._events):
            await until_gone(receive, writing)

    async def _write_json(self, send: Send, jobs: BigJobs) -> None:
        chunks: list[Any] = []
        async for event in self._events:
            chunks += await _made(jobs, self._count(event), self._writer.chunks, event)
        body = await _made(jobs, self._entries, lambda: msgspec.json.encode(self._writer.whole(chunks)))
        self.headers["content-length"] = str(len(body))
        await self._start(send)
        await send({"type": "http.response.body", "body": body})

    async def _write_stream(self, send: Send, jobs: BigJobs, period: float) -> None:
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._sent_at = asyncio.get_running_loop().time()
        pings = asyncio.create_task(self._ping(send, period)) if period else None
        try:
            async for event in self._events:
                made = await _made(jobs, self._count(event), lambda event: _sse(self._writer.chunks(event)), event)
                await self._put(send, made)
            await self._put(send, _sse(self._writer.last_chunks()))
        finally:
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": DONE})

    async def _ping(self, send: Send, period: float) -> None:
        """Send a comment whenever nothing was sent for a while. It looks at a clock, and costs events nothing."""
        clock = asyncio.get_running_loop().time
        while True:
            if (wait := self._sent_at + period - clock()) > 0:
                await asyncio.sleep(wait)
                continue
            await self._put(send, PING)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    def _count(self, event: Event) -> int:
        """Tokens and log-probabilities that an event adds to the answer."""
        found = len(event.token_ids) + sum(map(len, event.logprobs or ()))
        if event.index not in self._begun:
            self._begun.add(event.index)
            found += self._writer.of_prompt
        self._entries += found
        return found

    async def _put(self, send: Send, body: bytes) -> None:
        """Send a part of the stream, which begins with it."""
        if not self._started:
            await self._start(send)
        if body:
            self._sent_at = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _sse(chunks: Sequence[Any]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)


async def _made(jobs: BigJobs, entries: int, make: Callable[..., Result], *arguments: object) -> Result:
    """What a function makes of so many tokens and log-probabilities; of many, beside the event loop."""
    return make(*arguments) if entries < _MANY else await jobs.run(make, *arguments)


@dataclass(slots=True)
class Ended:
    """How a request went. Times are seconds, None where there was no such token."""

    prompt_tokens: int
    output_tokens: int = 0
    longest: int = 0
    """Tokens of its longest answer."""
    finish_reason: str = "abort"
    e2e: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    queue: float | None = None
    """In the engine's queue."""
    prefill: float | None = None
    """From there to the first token."""
    decode: float | None = None
    """From the first token to the last."""
    params: SamplingParams | None = None
    """None: it had no token."""


class Observer(Protocol):
    """Who counts requests, see `metrics.Metrics`."""

    def observe_request(self, ended: Ended) -> None:
        """Count a request that has ended."""

    def observe_gap(self, seconds: float) -> None:
        """Count the time between two pieces of an answer."""


WATCHED: ContextVar[list[Ended] | None] = ContextVar("WATCHED", default=None)
"""Where someone around the request of this context, who wants to know how it went, is told."""


async def observed(
    events: AsyncGenerator[Event, None], prompt_tokens: int, observer: Observer
) -> AsyncGenerator[Event, None]:
    """The same events; when they have ended, however that was, the request is counted."""
    ended, watched = Ended(prompt_tokens), WATCHED.get()
    begin = time.perf_counter()
    first = now = 0.0
    last: dict[int, float] = {}  # when each answer last grew
    counts: dict[int, int] = {}
    reason = None
    try:
        async with aclosing(events):
            async for event in events:
                now = time.perf_counter()
                if event.index in last:
                    observer.observe_gap(now - last[event.index])
                last[event.index] = now
                counts[event.index] = counts.get(event.index, 0) + len(event.token_ids)
                reason = event.finish_reason
                if event.params is not None:
                    first = first or now
                    ended.params = event.params
                    ended.queue, ended.prefill = event.times or (ended.queue, ended.prefill)
                yield event
        ended.finish_reason = reason.value if reason else "stop"
    except Exception:
        ended.finish_reason = "error"
        raise
    finally:
        ended.e2e = time.perf_counter() - begin
        if counts:
            ended.output_tokens, ended.longest = sum(counts.values()), max(counts.values())
            ended.ttft, ended.decode = first - begin, now - first
            if ended.output_tokens > 1:
                ended.tpot = ended.decode / (ended.output_tokens - 1)
        observer.observe_request(ended)
        if watched is not None:
            watched.append(ended)
