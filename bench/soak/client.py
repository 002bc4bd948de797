"""A client that sends one request over one connection, may leave at any moment, and keeps all that came."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["done", "rejected", "cancelled", "failed", "invalid", "lost"]
"""As the server counts them in outpace:http_requests_total; "lost" is one without a whole answer, which must not be."""
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
    """The client went away."""

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
        """The events of a stream but the last, which is [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def json(self) -> Any:
        """The body of an answer that is no stream."""
        return json.loads(self.body)

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.left:
            return "cancelled"
        if not self.whole:
            return "lost"
        if self.status in (429, 503):
            return "failed" if b'"engine_failed"' in self.body else "rejected"
        if self.status >= 400:
            return "failed" if self.status >= 500 else "invalid"
        if self.is_stream:
            if self.body.count(b"data: [DONE]") != 1:
                return "lost"
            return "failed" if b'data: {"error":' in self.body else "done"
        return "done"


def parse(data: bytes, answer: Answer) -> None:
    """Read a whole response, up to the end of its connection, into an answer."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return
    first, *lines = head.decode("latin-1").split("\r\n")
    answer.status = int(first.split(" ", 2)[1])
    answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if answer.headers.get("transfer-encoding") == "chunked":
        answer.body, answer.whole = dechunked(rest)
    else:
        answer.body = rest
        answer.whole = len(rest) == int(answer.headers.get("content-length", -1))


def dechunked(data: bytes) -> tuple[bytes, bool]:
    """The data of chunks (size in hex, CRLF, data, CRLF), and whether the last, of size 0, is there."""
    pieces: list[bytes] = []
    place = 0
    while (line := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:line], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(data[line + 2 : line + 2 + size])
        place = line + 2 + size + 2
    return b"".join(pieces), False


class Exchange(asyncio.Protocol):
    """One request and its answer. `at_event` events of a stream set `reached`."""

    def __init__(self, request: bytes, at_event: int) -> None:
        loop = asyncio.get_running_loop()
        self._request, self._at_event = request, at_event
        self._data = bytearray()
        self._events = 0
        self._transport: asyncio.Transport | None = None
        self.answer = Answer(time.perf_counter())
        self.reached, self.ended = loop.create_future(), loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """A piece of the answer."""
        if not self._data:
            self.answer.first = time.perf_counter()
        self._data += data
        if not self.reached.done():
            self._events += data.count(b"data: ")
            if self._events >= self._at_event:
                self.reached.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, whoever made it."""
        self.answer.end = time.perf_counter()
        if not self.answer.left:
            parse(bytes(self._data), self.answer)
        for future in (self.reached, self.ended):
            if not future.done():
                future.set_result(None)

    def leave(self) -> None:
        """Go away without a word, unless the answer has come whole."""
        assert self._transport is not None
        if not self.ended.done():
            self.answer.left = True
            self._transport.close()


@dataclass
class Ledger:
    """What was sent and how it ended, as the client saw it."""

    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        """One request that has ended."""
        self.ends[answer.outcome] += 1

    def agrees(self, server: Mapping[str, int]) -> bool:
        """Whether the server counted the same: a request that was left may have ended any way before that was seen."""
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

    async def open(self, body: Mapping[str, Any], path: str = "/v1/completions", at_event: int = 1) -> Exchange:
        """Send a POST; its answer is on the way."""
        self.ledger.sent += 1
        return await self._exchange(post(path, body), at_event)

    async def close(self, exchange: Exchange, patience: float = PATIENCE) -> Answer:
        """Wait for an answer and enter it in the ledger; one that takes longer than `patience` is lost."""
        await asyncio.wait((exchange.ended,), timeout=patience)
        if not exchange.ended.done():
            exchange.leave()
            await exchange.ended
            exchange.answer.left = False  # it did not want to
        self.ledger.add(exchange.answer)
        return exchange.answer

    async def ask(self, body: Mapping[str, Any], path: str = "/v1/completions", patience: float = PATIENCE) -> Answer:
        """A POST and its answer."""
        return await self.close(await self.open(body, path), patience)

    async def get(self, path: str) -> Answer:
        """A GET, which no ledger counts; status 0: nobody is there."""
        try:
            exchange = await self._exchange(
                f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode(), 1
            )
        except OSError:
            return Answer(time.perf_counter())
        await asyncio.wait((exchange.ended,), timeout=30)
        if not exchange.ended.done():
            exchange.leave()
        return exchange.answer

    async def send(self, request: bytes) -> Answer:
        """A request as it goes over the wire, which no ledger counts, and its answer."""
        exchange = await self._exchange(request, 1)
        await asyncio.wait((exchange.ended,), timeout=PATIENCE)
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
    return {line.split('outcome="')[1].split('"')[0]: int(float(line.split()[-1])) for line in _lines(metrics)}


def _lines(metrics: str) -> Iterator[str]:
    return (line for line in metrics.splitlines() if line.startswith("outpace:http_requests_total{"))
