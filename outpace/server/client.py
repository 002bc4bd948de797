"""EngineClient: the asyncio end of the socket to one engine process.

Memory does not grow while a reader is slow: new tokens of an answer are merged into the one delta that waits in its
mailbox, so a request holds at most its `n * max_tokens` tokens. Admission bounds what is written to the socket: a
request counts until the engine has ended it, cancelled or not.
"""

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import msgspec

from outpace.errors import EngineDead, EngineUnavailable, InputError, OutpaceError
from outpace.server.admission import Admission, Loads, Size
from outpace.server.engine import Delta, EngineRequest, EngineStatus, ModelCard, StepRecord
from outpace.server.mailbox import Mailbox
from outpace.server.messages import (
    Cancel,
    CountExperts,
    Frames,
    FromWorker,
    News,
    NotStarted,
    Ping,
    Ready,
    Start,
    Starting,
    add,
    error_of,
    frame,
)
from outpace.structured.wire import SentGrammars

LAST_STEPS = 64
COUNT_EVERY = 2.0  # seconds between `CountExperts` messages
EMBEDDED_AT_ONCE = 32  # requests for vectors that are in the engine together


class _Link(asyncio.Protocol):
    """Decodes the frames on the socket for a client."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self._frames = Frames()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._client.receive(self._decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine process closed its end, or is gone."""
        self._client.lose("the engine process ended")


class EngineClient:
    """An engine in another process, for as long as that process lives."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, Mailbox] = {}  # by number
        self._grammars = SentGrammars()
        self._loads = Loads(admission)
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._last = EngineStatus()
        self._last_steps: deque[StepRecord] = deque(maxlen=LAST_STEPS)
        self.progress_at = time.monotonic()
        """When the engine last made progress, or got work after it had none."""
        self.lost = asyncio.Event()
        """Set once the engine is gone."""
        self.startup_seconds: dict[str, float] = {}
        """Seconds of each part of the start; "all" is their sum."""
        self.part = "importing torch"
        """The part of the start that is running."""
        self.heard_at = time.monotonic()
        """When the last message of the engine came."""
        self.pinged_at: float | None = None
        """When the ping was sent that is not answered yet; None: there is none."""
        self._expert_load: list[list[int]] = []
        self._counted_at = float("-inf")

    async def open(self, sock: socket.socket, start: Start, *, since: float) -> None:
        """Let the engine load the model, and wait for it. The client owns the socket from now on.

        since: when the process was started, on the monotonic clock.
        """
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Link(self), sock=sock)
        self._transport = transport
        self._send(start)
        ready = await self._ready
        seconds, took = ready.status.startup_seconds, time.monotonic() - since
        # what the engine did not measure came before: the start of its process and the imports
        self.startup_seconds = {"imports": max(0.0, took - sum(seconds.values())), **seconds, "all": took}

    @property
    def ready(self) -> Ready:
        """The message that the engine sent when it was ready."""
        return self._ready.result()

    @property
    def card(self) -> ModelCard:
        """The loaded model."""
        return self.ready.card

    @property
    def in_flight(self) -> int:
        """Requests the engine has not finished with."""
        return len(self._open)

    def room(self, requests: Sequence[EngineRequest]) -> AbstractContextManager[None]:
        """Admit all of these requests or none. At the end of the context, those not submitted give their room back."""
        self._admit(requests)
        return self._loads.reserved(requests)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until every answer has ended; closing the generator cancels the request."""
        box = self._submit(request)
        try:
            while box.deltas or box.error or box.open:
                if box.deltas:
                    deltas, box.deltas = box.deltas, {}
                    for delta in deltas.values():
                        yield delta
                        if request.unwanted:
                            self._give_up(box, request.unwanted)
                elif box.error is not None:
                    raise box.error
                else:
                    await box.wait()
        finally:
            self._leave(box)

    async def embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        """The vector of each request; a few requests at a time, so that there is room for others."""
        vectors: list[list[float]] = []
        for begin in range(0, len(requests), EMBEDDED_AT_ONCE):
            vectors += await self._embed(requests[begin : begin + EMBEDDED_AT_ONCE])
        return vectors

    async def _embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        boxes: list[Mailbox] = []
        self._admit(requests)
        try:
            for request in requests:
                boxes.append(self._enter(request))
            return [await self._vector(box) for box in boxes]
        finally:
            for box in boxes:
                self._leave(box)

    def status(self) -> EngineStatus:
        """The newest numbers. Also asks for new counts of experts, which a later call returns."""
        last = self._last
        if last.expert_layers and time.monotonic() - self._counted_at > COUNT_EVERY:
            self._counted_at = time.monotonic()
            self._send(CountExperts())
        # the engine counted at its last step: requests since then are waiting
        sequences = sum(box.open for box in self._open.values())
        running = min(last.running, sequences)
        return replace(
            last,
            ready=not self.lost.is_set(),
            running=running,
            waiting=sequences - running,
            last_steps=list(self._last_steps),
            startup_seconds=self.startup_seconds,
            expert_load=self._expert_load,
        )

    def ping(self) -> None:
        """Ask an idle engine for a sign of life, unless a ping is unanswered."""
        if self.pinged_at is None:
            self.pinged_at = time.monotonic()
            self._send(Ping())

    def lose(self, reason: str) -> None:
        """The engine is gone: every request fails."""
        if self._transport is not None:
            self._transport.close()
        self.lost.set()
        error = EngineDead(f"{reason}; try again later")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # read, so that asyncio does not warn if nobody waits for it
        for box in list(self._open.values()):
            self._forget(box)
            box.error = error
            box.wake()

    def receive(self, message: FromWorker) -> None:
        """Handle a message of the engine."""
        self.heard_at = time.monotonic()
        if isinstance(message, News):
            self._take(message)
        elif isinstance(message, Starting):
            self.part = message.part
        elif self._ready.done():
            pass  # nobody waits for it any more
        elif isinstance(message, NotStarted):
            self._ready.set_exception(error_of(message.kind, message.message))
        else:
            self._last = message.status
            self._ready.set_result(message)

    def _take(self, news: News) -> None:
        steps = self._last.steps
        if news.pong:
            self.pinged_at = None
        if news.expert_load is not None:
            self._expert_load = news.expert_load
        if news.status is not None:
            self._last = news.status
            self._last_steps.extend(news.status.last_steps)
        if news.deltas or news.failures or news.vectors or news.cancelled or self._last.steps > steps:
            self.progress_at = time.monotonic()
        for delta in news.deltas:
            if (box := self._open.get(delta.number)) is not None:
                self._begin(box)
                box.put(delta)
                if not box.open:
                    self._forget(box)
        for number, vector in news.vectors:
            self._end(number, vector=vector)
        for failure in news.failures:
            self._end(failure.number, error=error_of(failure.kind, failure.message))
        for number in news.cancelled:
            self._end(number)
        if news.last:  # before a caller who got an error can ask whether the engine is ready
            self.lose("the engine process ended")

    def _submit(self, request: EngineRequest) -> Mailbox:
        if self.lost.is_set() or not self._loads.claim(request):
            self._admit([request])
        for message in self._grammars.before(request.grammar):
            self._send(message)
        return self._enter(request)

    def _admit(self, requests: Sequence[EngineRequest]) -> None:
        """Refuse requests when the queue is full, or when one caller has too many."""
        if self.lost.is_set():
            raise EngineUnavailable("the engine is not running; try again later")
        self._loads.admit(Size.of(requests), self.ready.max_num_seqs)

    def _enter(self, request: EngineRequest) -> Mailbox:
        number = next(self._numbers)
        box = Mailbox(number, Size.of([request]), request.params.n)
        try:
            data = frame(add(number, request))
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise InputError(f"request: a value is out of range ({error})") from None
        if not self._open:
            self.progress_at = time.monotonic()
        self._open[box.number] = box
        self._loads.enter(box.size)
        assert self._transport is not None, "nothing is admitted before the engine is ready"
        self._transport.write(data)
        return box

    def _begin(self, box: Mailbox) -> None:
        """Count it as running: its first token is there."""
        if not box.begun:
            box.begun = True
            self._loads.begin(box.size)

    def _forget(self, box: Mailbox) -> None:
        self._begin(box)
        self._loads.leave(box.size)
        del self._open[box.number]

    def _end(self, number: int, *, vector: list[float] | None = None, error: OutpaceError | None = None) -> None:
        """The engine has finished with a request, other than by its last delta."""
        if (box := self._open.get(number)) is not None:
            if vector is not None:
                box.vector, box.open = vector, 0
            box.error = error or box.error
            self._forget(box)
            box.wake()

    def _leave(self, box: Mailbox) -> None:
        """Its reader has gone: cancel it. The mailbox stays until the engine confirms that."""
        if box.number in self._open and not box.cancelled:
            box.cancelled = True
            box.deltas.clear()
            self._send(Cancel(box.number))

    def _give_up(self, box: Mailbox, unwanted: set[int]) -> None:
        """Have the engine end the answers that are not needed; the others go on."""
        if box.number not in self._open or box.cancelled:
            return
        for index in unwanted - box.unwanted:
            box.unwanted.add(index)
            self._send(Cancel(box.number, index))

    async def _vector(self, box: Mailbox) -> list[float]:
        while box.vector is None:
            if box.error is not None:
                raise box.error
            await box.wait()
        return box.vector

    def _send(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))
