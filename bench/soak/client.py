"""A client that sends one request per connection, may leave at any moment, and keeps everything that came."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.bench.http import Response

Outcome = Literal["done", "rejected", "cancelled", "failed", "invalid", "lost"]
"""As the server counts them in outpace:http_requests_total; "lost" has no whole answer, which must not happen."""
PATIENCE = 120.0  # seconds for one request; longer is a hang


@dataclass(slots=True)
class Answer:
    """What came of one request; times are seconds of a monotonic clock."""

    begin: float
    first: float = 0.0
    """The first byte."""
    end: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    left: bool = False
    """The client left."""
    times: list[float] = field(default_factory=list)
    """When events of a stream came, in seconds from the beginning."""

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
        """The events of a stream without [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def json(self) -> Any:
        """The body of an answer that is no stream."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The text of a completion, streamed or not."""
        parts = self.events if self.is_stream else [self.json]
        return "".join(choice["text"] for part in parts for choice in part["choices"])

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


def parse(data: bytes, answer: Answer) -> None:
    """Read everything that came over a connection into an answer."""
    pieces: list[bytes] = []
    response = Response(pieces.append)
    with contextlib.suppress(ValueError, IndexError):  # not HTTP/1.1: the answer is lost
        response.feed(data)
    answer.status, answer.headers = response.status, response.headers
    answer.body, answer.whole = b"".join(pieces), response.done


class Exchange(asyncio.Protocol):
    """One request and its answer. The event number `at_event` of a stream sets `reached`."""

    def __init__(self, request: bytes, at_event: int) -> None:
        loop = asyncio.get_running_loop()
        self._request, self._at_event = request, at_event
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self.answer = Answer(time.perf_counter())
        self.reached, self.ended = loop.create_future(), loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
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
        """Note the end, whoever closed the connection."""
        self.answer.end = time.perf_counter()
        if not self.answer.left:
            parse(bytes(self._data), self.answer)
        for future in (self.reached, self.ended):
            if not future.done():
                future.set_result(None)

    def leave(self) -> None:
        """Close the connection, unless the answer is complete."""
        assert self._transport is not None
        if not self.ended.done():
            self.answer.left = True
            self._transport.close()


@dataclass
class Ledger:
    """What was sent and how it ended, as the client saw it."""

    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def agrees(self, server: Mapping[str, int]) -> bool:
        """Whether the server counted the same. Cancelled requests may have ended in any way before it noticed."""
        left, mine = self.ends["cancelled"], self.ends
        names = ("done", "rejected", "failed", "invalid")
        return (
            self.sent == sum(mine.values()) == sum(server.values())
            and not mine["lost"]
            and all(mine[name] <= server.get(name, 0) <= mine[name] + left for name in names)
        )


@dataclass
class Client:
    """Sends requests to one server, and keeps a ledger of them."""

    port: int
    ledger: Ledger = field(default_factory=Ledger)

    async def open(
        self, body: Mapping[str, Any] | bytes, path: str = "/v1/completions", at_event: int = 1, key: str | None = None
    ) -> Exchange:
        """Send a POST, of a body or of bytes as they go over the wire."""
        self.ledger.sent += 1
        return await self._exchange(body if isinstance(body, bytes) else post(path, body, key=key), at_event)

    async def close(self, exchange: Exchange, patience: float = PATIENCE) -> Answer:
        """Wait for an answer and enter it in the ledger; after `patience` seconds it is lost."""
        await asyncio.wait((exchange.ended,), timeout=patience)
        if not exchange.ended.done():
            exchange.leave()
            await exchange.ended
            exchange.answer.left = False  # a timeout, not a cancellation
        self.ledger.ends[exchange.answer.outcome] += 1
        return exchange.answer

    async def ask(
        self, body: Mapping[str, Any] | bytes, path: str = "/v1/completions", patience: float = PATIENCE
    ) -> Answer:
        """Send a POST and wait for its answer."""
        return await self.close(await self.open(body, path), patience)

    async def get(self, path: str) -> Answer:
        """Send a GET, which is not in the ledger; status 0: nobody listens."""
        try:
            request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
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
    """A POST as it goes over the wire."""
    data = json.dumps(body).encode()
    connection = "keep-alive" if keep_alive else "close"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: {connection}\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n" if key is not None else ""
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def outcomes(metrics: str) -> dict[str, int]:
    """How requests ended, from the text of /metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("outpace:http_requests_total{")]
    return {line.split('outcome="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines}
