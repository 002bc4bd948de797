"""Sends deltas to the client: as one JSON answer, or as server-sent events while they come."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.server.big_jobs import BigJobs
from outpace.server.engine import Delta
from outpace.server.gone import until_gone
from outpace.server.problems import DONE
from outpace.server.write import AnswerWriter

PING = b": ping\n\n"
_MANY = 1024  # log-probabilities; writing them takes milliseconds
Result = TypeVar("Result")


class Reply(Response):
    """Answers a request as server-sent events or as JSON, and cancels it as soon as the client is gone.

    A stream begins with its first event, or with a ping if that takes long: an error before that has its own status
    code. A later error is raised too, and `guard.Guard` makes it the last event of the stream.
    """

    def __init__(self, deltas: AsyncGenerator[Delta, None], writer: AnswerWriter, *, stream: bool) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._deltas, self._writer, self._stream = deltas, writer, stream
        self._started, self._sent_at = False, 0.0
        self._begun: set[int] = set()  # answers
        self._entries = 0  # tokens and log-probabilities so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer."""
        state = scope["app"].state
        period, jobs = state.options.sse_ping_seconds, state.services.answers
        writing = self._write_stream(send, jobs, period) if self._stream else self._write_json(send, jobs)
        async with aclosing(self._deltas):
            await until_gone(receive, writing)

    async def _write_json(self, send: Send, jobs: BigJobs) -> None:
        chunks: list[Any] = []
        async for delta in self._deltas:
            chunks += await _made(jobs, self._count(delta), self._writer.chunks, delta)
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
            async for delta in self._deltas:
                made = await _made(jobs, self._count(delta), self._sse_chunks, delta)
                await self._put(send, made)
            await self._put(send, _sse(self._writer.last_chunks()))
        finally:
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": DONE})

    async def _ping(self, send: Send, period: float) -> None:
        """Send a comment whenever nothing was sent for a while. It checks a clock, so events need no timer."""
        clock = asyncio.get_running_loop().time
        while True:
            if (wait := self._sent_at + period - clock()) > 0:
                await asyncio.sleep(wait)
                continue
            await self._put(send, PING)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    def _count(self, delta: Delta) -> int:
        """Tokens and log-probabilities that a delta adds to the answer."""
        found = len(delta.token_ids) + sum(map(len, delta.logprobs or ()))
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            found += self._writer.of_prompt
        self._entries += found
        return found

    def _sse_chunks(self, delta: Delta) -> bytes:
        return _sse(self._writer.chunks(delta))

    async def _put(self, send: Send, body: bytes) -> None:
        """Send a part of the stream; the first part begins it."""
        if not self._started:
            await self._start(send)
        if body:
            self._sent_at = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _sse(chunks: Sequence[Any]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)


async def _made(jobs: BigJobs, entries: int, make: Callable[..., Result], *arguments: object) -> Result:
    """Call a function that writes this many tokens and log-probabilities; in a thread if they are many."""
    return make(*arguments) if entries < _MANY else await jobs.run(make, *arguments)
