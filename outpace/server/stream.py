"""One generator of events for each request; plain JSON and server-sent events are two ways to write them down."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.log import logger
from outpace.server.engine import Delta, Engine, EngineDead
from outpace.server.problems import as_api_error
from outpace.server.tokens import Tokens
from outpace.server.validate import Work
from outpace.tokenizer import Detokenizer
from outpace.types import FinishReason, TokenLogprobs

DONE = b"data: [DONE]\n\n"
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
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """In the first event of a prompt, if asked for."""


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
        )


async def events_of(
    engine: Engine, work: Work, tokens: Tokens, request_id: str, prompt: int = 0
) -> AsyncGenerator[Event, None]:
    """The events of one prompt. The engine's generator is closed as soon as no answer needs it any more."""
    count = work.params.n
    answers = [_Answer(work, tokens, prompt, prompt * count + number) for number in range(count)]
    async with aclosing(engine.generate(work.request(request_id))) as deltas:
        async for delta in deltas:
            answer = answers[delta.index]
            if answer.finished:
                continue  # it met a stop string while the others go on
            yield answer.take(delta)
            if all(answer.finished for answer in answers):
                return
    raise EngineDead("the engine left a request unanswered")


async def events_of_all(
    engine: Engine, works: Sequence[Work], tokens: Tokens, request_id: str
) -> AsyncGenerator[Event, None]:
    """The events of several prompts as they come; an error of one ends all."""
    sources = [events_of(engine, work, tokens, f"{request_id}-{number}", number) for number, work in enumerate(works)]
    merged = sources[0] if len(sources) == 1 else _merge(sources)
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

    def chunks(self, event: Event) -> list[Any]:
        """What an event adds, as the route writes it; nothing for an event that shows nothing yet."""

    def last_chunks(self) -> list[Any]:
        """What stands behind all events of a stream."""

    def whole(self, chunks: Sequence[Any]) -> Any:
        """The answer that these chunks are the pieces of."""


class Reply(Response):
    """Answers a request as events or as JSON, and gives it up as soon as the client is gone.

    A stream begins with its first event: what goes wrong before that has a status code of its own.
    """

    def __init__(self, events: AsyncGenerator[Event, None], writer: Writer, *, stream: bool, request_id: str) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._events, self._writer, self._stream, self._request_id = events, writer, stream, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer."""
        async with aclosing(self._events):
            await until_gone(receive, self._write_stream(send) if self._stream else self._write_json(send))

    async def _write_json(self, send: Send) -> None:
        chunks = [chunk async for event in self._events for chunk in self._writer.chunks(event)]
        body = msgspec.json.encode(self._writer.whole(chunks))
        self.headers["content-length"] = str(len(body))
        await self._start(send)
        await send({"type": "http.response.body", "body": body})

    async def _write_stream(self, send: Send) -> None:
        events = aiter(self._events)
        first = await anext(events)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        await self._start(send)
        try:
            await self._send(send, self._writer.chunks(first))
            async for event in events:
                await self._send(send, self._writer.chunks(event))
            await self._send(send, self._writer.last_chunks())
        except Exception as error:
            problem = as_api_error(error, self._request_id)
            if problem.status >= 500:
                logger.error("request %s failed", self._request_id, exc_info=error)
            await self._send(send, [problem.body])
        await send({"type": "http.response.body", "body": DONE})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send(self, send: Send, chunks: Sequence[Any]) -> None:
        if chunks:
            body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
            await send({"type": "http.response.body", "body": body, "more_body": True})


class ClientGone(Exception):
    """Nobody is there to read the answer."""


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of some work, unless the client goes away first: then the work is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait((task, watch))
        for each in (task, watch):
            _ = each.cancelled() or each.exception()  # read, so that nobody warns of an error unread


class Observer(Protocol):
    """Who counts requests, see `metrics.Metrics`."""

    def observe_request(
        self,
        prompt_tokens: int,
        output_tokens: int,
        ttft: float | None,
        tpot: float | None,
        e2e: float,
        finish_reason: str,
    ) -> None:
        """Count a request that has ended."""


async def observed(
    events: AsyncGenerator[Event, None], prompt_tokens: int, observer: Observer
) -> AsyncGenerator[Event, None]:
    """The same events; when they have ended, however that was, the request is counted."""
    begin = time.perf_counter()
    first = last = 0.0
    count, reason, ended = 0, "abort", None
    try:
        async with aclosing(events):
            async for event in events:
                last = time.perf_counter()
                first = first or last
                count += len(event.token_ids)
                ended = event.finish_reason
                yield event
        reason = ended.value if ended else "stop"
    except Exception:
        reason = "error"
        raise
    finally:
        each = (last - first) / (count - 1) if count > 1 else None
        whole = time.perf_counter() - begin
        observer.observe_request(prompt_tokens, count, first - begin if first else None, each, whole, reason)
