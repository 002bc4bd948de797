"""EngineClient: the asyncio end of the socket to one engine process.

Nothing here grows with a consumer that does not read: what comes for an answer is added to the one delta that waits for
it, so a request holds at most its `n * max_tokens` tokens. What is written to the socket is bounded by admission, in
which a request counts until the engine has said its last word about it, cancelled or not.
"""

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec

from outpace.errors import EngineDead, EngineUnavailable, InputError, OutpaceError
from outpace.server.admission import Admission, Loads, Size
from outpace.server.engine import Delta, EngineRequest, EngineStatus, ModelCard, StepRecord
from outpace.server.known_grammars import Taught
from outpace.server.messages import (
    Cancel,
    Frames,
    FromWorker,
    Look,
    News,
    NotStarted,
    Numbers,
    Ping,
    Ready,
    Start,
    Starting,
    Tokens,
    add,
    error_of,
    frame,
)

LAST_STEPS = 64
LOOK_EVERY = 2.0  # seconds between questions for the load of experts
EMBEDDED_AT_ONCE = 32  # requests for vectors


@dataclass(slots=True, eq=False)
class _Entry:
    """A request the engine has not finished with: a mailbox with at most one delta for each answer."""

    number: int
    size: Size
    open: int  # answers that have not ended; 0 for a vector that has come
    begun: bool = False
    cancelled: bool = False
    unwanted: set[int] = field(default_factory=set)  # answers that the engine has been told to end
    deltas: dict[int, Delta] = field(default_factory=dict)
    vector: list[float] | None = None
    error: OutpaceError | None = None
    waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until something has come."""
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def put(self, tokens: Tokens) -> None:
        """Take tokens in; the consumer gets them when it looks."""
        self.open -= tokens.finish_reason is not None
        if self.cancelled:
            return
        if tokens.index in self.unwanted:
            if not self.open:
                self.wake()
            return
        waiting = self.deltas.get(tokens.index)
        if waiting is None:
            self.deltas[tokens.index] = tokens.delta()
        else:
            _merge(waiting, tokens.delta())
        self.wake()


def _merge(old: Delta, new: Delta) -> None:
    old.token_ids += new.token_ids
    if old.logprobs is not None and new.logprobs is not None:
        old.logprobs += new.logprobs
    old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    old.times = old.times or new.times


class _Link(asyncio.Protocol):
    """Frames of the socket, given to a client."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self._frames = Frames()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

    def data_received(self, data: bytes) -> None:
        """Bytes of frames."""
        for body in self._frames.feed(data):
            self._client.receive(self._decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine process closed its end, or is gone."""
        self._client.lose("the engine process ended")


class EngineClient:
    """An engine in another process, for as long as that process lives."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, _Entry] = {}
        self._taught = Taught()
        self._loads = Loads(admission)
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._last = Numbers(0, 0, 0, 0, 0, 0, 0, 0, 0, [])
        self._last_steps: deque[StepRecord] = deque(maxlen=LAST_STEPS)
        self.progress_at = time.monotonic()
        """When the engine last did anything, or got work after it had none."""
        self.lost = asyncio.Event()
        """Set once the engine is gone."""
        self.startup_seconds: dict[str, float] = {}
        """What the start took by part; "all" is what a clock showed, and the others add up to it."""
        self.part = "importing torch"
        """How far the start is."""
        self.heard_at = time.monotonic()
        """When the engine last said anything."""
        self.pinged_at: float | None = None
        """When it was asked whether it is there, if it has not answered since."""
        self._expert_load: list[list[int]] = []
        self._looked_at = float("-inf")

    async def open(self, sock: socket.socket, start: Start, *, since: float | None = None) -> None:
        """Have the engine load the model, and wait until it has; the socket is the client's from here on.

        since: when the process was started, on the monotonic clock.
        """
        begin = time.monotonic() if since is None else since
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Link(self), sock=sock)
        self._transport = transport
        self._send(start)
        ready = await self._ready
        self.startup_seconds = _all_parts(ready.startup_seconds, time.monotonic() - begin)

    @property
    def ready(self) -> Ready:
        """What the engine said of itself."""
        return self._ready.result()

    @property
    def card(self) -> ModelCard:
        """The loaded model."""
        return self.ready.card

    @property
    def in_flight(self) -> int:
        """Requests the engine has not finished with."""
        return len(self._entries)

    def room(self, requests: Sequence[EngineRequest]) -> AbstractContextManager[None]:
        """Admit requests together, or none of them; what is not submitted when the context ends gives its room back."""
        self._admit(requests)
        return self._loads.reserved(requests)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until every answer has ended; closing the generator cancels the request."""
        entry = self._submit(request)
        try:
            while entry.deltas or entry.error or entry.open:
                if entry.deltas:
                    deltas, entry.deltas = entry.deltas, {}
                    for delta in deltas.values():
                        yield delta
                        if request.unwanted:
                            self._give_up(entry, request.unwanted)
                elif entry.error is not None:
                    raise entry.error
                else:
                    await entry.wait()
        finally:
            self._leave(entry)

    async def embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        """The vector that each request asks for; of many some at a time, so that they leave room for others."""
        vectors: list[list[float]] = []
        for begin in range(0, len(requests), EMBEDDED_AT_ONCE):
            vectors += await self._embed(requests[begin : begin + EMBEDDED_AT_ONCE])
        return vectors

    async def _embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        entries: list[_Entry] = []
        self._admit(requests)
        try:
            for request in requests:
                entries.append(self._enter(request))
            return [await self._vector(entry) for entry in entries]
        finally:
            for entry in entries:
                self._leave(entry)

    def status(self) -> EngineStatus:
        """The newest numbers. Those of experts are asked for here, and are there the next time."""
        last = self._last
        if self.ready.expert_layers and time.monotonic() - self._looked_at > LOOK_EVERY:
            self._looked_at = time.monotonic()
            self._send(Look())
        # the engine's own numbers are those of its last step: what came since waits
        sequences = sum(entry.open for entry in self._entries.values())
        running = min(last.running, sequences)
        return EngineStatus(
            ready=not self.lost.is_set(),
            running=running,
            waiting=sequences - running,
            free_blocks=last.free_blocks,
            num_blocks=self.ready.num_blocks,
            steps=last.steps,
            prompt_tokens=last.prompt_tokens,
            generated_tokens=last.generated_tokens,
            preemptions=last.preemptions,
            prefix_hits=last.prefix_hits,
            prefix_queries=last.prefix_queries,
            last_steps=list(self._last_steps),
            startup_seconds=self.startup_seconds,
            step_limit_ms=self.ready.step_limit_ms,
            cache_config=self.ready.cache_config,
            step_sizes=list(last.step_sizes),
            step_tokens=last.step_tokens,
            levels=dict(last.levels),
            expert_layers=self.ready.expert_layers,
            nodes=self.ready.nodes,
            expert_load=self._expert_load,
        )

    def ping(self) -> None:
        """Ask an engine that has nothing to do whether it is there, if it is one that answers."""
        if self.ready.answers_pings and self.pinged_at is None:
            self.pinged_at = time.monotonic()
            self._send(Ping())

    async def close(self) -> None:
        """Hang up, whereupon the engine process ends."""
        self.lose("the engine is closed")

    def lose(self, reason: str) -> None:
        """The engine is gone: every request fails."""
        if self._transport is not None:
            self._transport.close()
        self.lost.set()
        error = EngineDead(f"{reason}; try again later")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it is not an oversight if nobody waits for it
        for entry in list(self._entries.values()):
            self._forget(entry)
            entry.error = error
            entry.wake()

    def receive(self, message: FromWorker) -> None:
        """Take in what the engine says."""
        self.heard_at = time.monotonic()
        if isinstance(message, News):
            self._take(message)
        elif isinstance(message, Starting):
            self.part = message.part
        elif self._ready.done():
            pass  # given up waiting
        elif isinstance(message, NotStarted):
            self._ready.set_exception(error_of(message.kind, message.message))
        else:
            self._last.free_blocks = message.num_blocks
            self._ready.set_result(message)

    def _take(self, news: News) -> None:
        steps = self._last.steps
        if news.pong:
            self.pinged_at = None
        if news.expert_load is not None:
            self._expert_load = news.expert_load
        if news.numbers is not None:
            self._last = news.numbers
            self._last_steps.extend(news.numbers.new_steps)
        if news.tokens or news.failures or news.vectors or news.cancelled or self._last.steps > steps:
            self.progress_at = time.monotonic()
        for tokens in news.tokens:
            if (entry := self._entries.get(tokens.number)) is not None:
                self._begin(entry)
                entry.put(tokens)
                if not entry.open:
                    self._forget(entry)
        for number, vector in news.vectors:
            if (entry := self._entries.get(number)) is not None:
                entry.vector, entry.open = vector, 0
                self._end(entry)
        for failure in news.failures:
            if (entry := self._entries.get(failure.number)) is not None:
                entry.error = error_of(failure.kind, failure.message)
                self._end(entry)
        for number in news.cancelled:
            if (entry := self._entries.get(number)) is not None:
                self._end(entry)

    def _submit(self, request: EngineRequest) -> _Entry:
        if self.lost.is_set() or not self._loads.claim(request):
            self._admit([request])
        for message in self._taught.before(request.grammar):
            self._send(message)
        return self._enter(request)

    def _admit(self, requests: Sequence[EngineRequest]) -> None:
        """Refuse what would have to wait behind too much, or what is more than one caller may have."""
        if self.lost.is_set():
            raise EngineUnavailable("the engine is not running; try again later")
        self._loads.admit(Size.of(requests), self.ready.max_num_seqs)

    def _enter(self, request: EngineRequest) -> _Entry:
        number = next(self._numbers)
        entry = _Entry(number, Size.of([request]), request.params.n)
        try:
            data = frame(add(number, request))
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise InputError(f"request: a value is out of range ({error})") from None
        if not self._entries:
            self.progress_at = time.monotonic()
        self._entries[entry.number] = entry
        self._loads.enter(entry.size)
        assert self._transport is not None, "nothing is admitted before the engine is ready"
        self._transport.write(data)
        return entry

    def _begin(self, entry: _Entry) -> None:
        """Its first token is there: it does not wait any more."""
        if not entry.begun:
            entry.begun = True
            self._loads.begin(entry.size)

    def _forget(self, entry: _Entry) -> None:
        self._begin(entry)
        self._loads.leave(entry.size)
        del self._entries[entry.number]

    def _end(self, entry: _Entry) -> None:
        self._forget(entry)
        entry.wake()

    def _leave(self, entry: _Entry) -> None:
        """Its consumer has gone; the entry stays until the engine knows."""
        if entry.number in self._entries and not entry.cancelled:
            entry.cancelled = True
            entry.deltas.clear()
            self._send(Cancel(entry.number))

    def _give_up(self, entry: _Entry, unwanted: set[int]) -> None:
        """Have the engine end answers that nobody needs, while others go on."""
        if entry.number not in self._entries or entry.cancelled:
            return
        for index in unwanted - entry.unwanted:
            entry.unwanted.add(index)
            self._send(Cancel(entry.number, index))

    async def _vector(self, entry: _Entry) -> list[float]:
        while entry.vector is None:
            if entry.error is not None:
                raise entry.error
            await entry.wait()
        return entry.vector

    def _send(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))


def _all_parts(seconds: dict[str, float], took: float) -> dict[str, float]:
    """The parts that the engine measured, and before them the rest: the start of a process and its imports."""
    return {"imports": max(0.0, took - sum(seconds.values())), **seconds, "all": took}
