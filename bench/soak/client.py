"""A client that sends one request per connection, can disconnect at any moment, and keeps the whole answer."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.bench.http import Response

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = 120.0  # seconds for one request; longer is a hang
Outcome = Literal["done", "rejected", "cancelled", "failed", "invalid", "lost"]
"""As the server counts them in outpace:http_requests_total; "lost": no complete answer, which must not happen."""


@dataclass(slots=True)
class Answer:
    """The answer to one request; times are seconds of a monotonic clock."""

    begin: float
    first: float = 0.0
    """When the first byte came."""
    end: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    left: bool = False
    """The client disconnected."""
    times: list[float] = field(default_factory=list)
    """When events of a stream came, in seconds from the start."""

    @property
    def seconds(self) -> float:
        """From sending to the end."""
        return self.end - self.begin

    @property
    def is_stream(self) -> bool:
        """Whether the body is events."""
        return "event-stream" in self.headers.get("content-type", "")

    @property
    def events(self) -> list[Any]:
        """The events of a stream without [DONE]; of a plain answer, its whole body."""
        lines = [self.body]
        if self.is_stream:
            lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def text(self) -> str:
        """The text of a completion."""
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.left:
            return "cancelled"
        if not self.whole or (self.is_stream and self.body.count(b"data: [DONE]") != 1):
            return "lost"
        if self.status in (429, 503):
            return "failed" if b'"engine_failed"' in self.body else "rejected"
        if self.status >= 500 or (self.is_stream and b'data: {"error":' in self.body):
            return "failed"
        return "invalid" if self.status >= 400 else "done"

    def parse(self, data: bytes) -> None:
        """Parse everything that came over the connection."""
        pieces: list[bytes] = []
        response = Response(pieces.append)
        with contextlib.suppress(ValueError, IndexError):  # not HTTP/1.1: the answer is lost
            response.feed(data)
        self.status, self.headers = response.status, response.headers
        self.body, self.whole = b"".join(pieces), response.done


class Exchange(asyncio.Protocol):
    """One request and its answer. `reached` is set by event number `at_event` of a stream, or at the end."""

    _transport: asyncio.Transport

    def __init__(self, request: bytes, at_event: int) -> None:
        loop = asyncio.get_running_loop()
        self.answer = Answer(time.perf_counter())
        self.reached, self.ended = loop.create_future(), loop.create_future()
        self._request, self._at_event, self._data = request, at_event, bytearray()

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep a piece of the answer."""
        answer, now = self.answer, time.perf_counter()
        answer.first = answer.first or now
        self._data += data
        answer.times += [now - answer.begin] * data.count(b"data: {")
        if not self.reached.done() and len(answer.times) >= self._at_event:
            self.reached.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, whichever side closed the connection."""
        self.answer.end = time.perf_counter()
        if not self.answer.left:
            self.answer.parse(bytes(self._data))
        for future in (self.reached, self.ended):
            if not future.done():
                future.set_result(None)

    def leave(self) -> None:
        """Close the connection, unless the answer is complete."""
        if not self.ended.done():
            self.answer.left = True
            self._transport.close()


@dataclass
class Ledger:
    """The client's count of sent requests and of their outcomes."""

    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def agrees(self, server: Mapping[str, int]) -> bool:
        """Whether the server counted the same; a cancelled request may have ended otherwise before it noticed."""
        left, mine = self.ends["cancelled"], self.ends
        names = ("done", "rejected", "failed", "invalid")
        return (
            self.sent == sum(mine.values()) == sum(server.values())
            and not mine["lost"]
            and all(mine[name] <= server.get(name, 0) <= mine[name] + left for name in names)
        )


@dataclass(kw_only=True)
class Client:
    """Sends requests to one server, and keeps a ledger of them."""

    port: int
    patience: float = PATIENCE
    ledger: Ledger = field(default_factory=Ledger)

    async def send(
        self, body: Mapping[str, Any] | bytes, path: str = COMPLETIONS, *, at_event: int = 1, key: str | None = None
    ) -> Exchange:
        """Send a POST, given as a body or as raw bytes."""
        self.ledger.sent += 1
        return await self._exchange(body if isinstance(body, bytes) else post(path, body, key=key), at_event)

    async def receive(self, exchange: Exchange) -> Answer:
        """Wait for an answer and count it in the ledger; after a timeout it is lost."""
        await asyncio.wait((exchange.ended,), timeout=self.patience)
        if not exchange.ended.done():
            exchange.leave()
            await exchange.ended
            exchange.answer.left = False  # a timeout, not a cancellation
        self.ledger.ends[exchange.answer.outcome] += 1
        return exchange.answer

    async def ask(self, body: Mapping[str, Any] | bytes, path: str = COMPLETIONS, *, key: str | None = None) -> Answer:
        """Send a POST and wait for its answer."""
        return await self.receive(await self.send(body, path, key=key))

    async def get(self, path: str) -> Answer:
        """Send a GET, which is not counted; status 0: nothing listens on the port."""
        request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        try:
            exchange = await self._exchange(request.encode(), 1)
        except OSError:
            return Answer(time.perf_counter())
        await asyncio.wait((exchange.ended,), timeout=30)
        exchange.leave()
        return exchange.answer

    async def _exchange(self, request: bytes, at_event: int) -> Exchange:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Exchange(request, at_event), "127.0.0.1", self.port)
        return made


def post(path: str, body: Mapping[str, Any], *, keep_alive: bool = False, key: str | None = None) -> bytes:
    """The raw bytes of a POST."""
    data = json.dumps(body).encode()
    connection = "keep-alive" if keep_alive else "close"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: {connection}\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n" if key is not None else ""
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def outcomes(metrics: str) -> dict[str, int]:
    """Number of requests by outcome, from the text of /metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("outpace:http_requests_total{")]
    return {line.split('outcome="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines}
