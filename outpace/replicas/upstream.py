"""One request to a replica, over a connection of its own: closing it before the end aborts the request there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import h11

Headers = Sequence[tuple[bytes, bytes]]
_HEAD = 64 * 2**10  # bytes of the longest head of an answer
_READ = 64 * 2**10  # bytes that are read at once
_LONGEST = 64 * 2**20  # bytes of an answer that is fetched whole
HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    }
)
"""Headers of one connection, which are not forwarded."""


class Broken(Exception):
    """The replica is gone, or the connection ended before the whole answer had come."""


class Exchange:
    """A request that was sent, and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD)
        self._ended = False

    async def send(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a request. One of the headers gives the length of the body."""
        head = self._http.send(h11.Request(method=method, target=target, headers=list(headers)))
        ended = self._http.send(h11.EndOfMessage()) if not body else self._http.send(h11.Data(body))
        try:
            self._writer.write((head or b"") + (ended or b""))
            await self._writer.drain()
        except OSError as error:
            raise Broken(str(error)) from error
        if body:
            self._http.send(h11.EndOfMessage())

    async def head(self) -> h11.Response:
        """The status and the headers of the answer."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event

    async def data(self) -> bytes:
        """The next piece of the body, all that is there already; empty: it has ended."""
        pieces: list[bytes] = []
        while not self._ended:
            event = self._event() if pieces else await self._next()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif event is h11.NEED_DATA:
                break
            else:
                self._ended = True
        return b"".join(pieces)

    async def _next(self) -> object:
        """The next event, once enough bytes have come."""
        while (event := self._event()) is h11.NEED_DATA:
            try:
                received = await self._reader.read(_READ)
            except OSError as error:
                raise Broken(str(error)) from error
            if not received:
                raise Broken("the connection was closed")
            self._http.receive_data(received)
        return event

    def _event(self) -> object:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise Broken(str(error)) from error


@asynccontextmanager
async def connected(path: str) -> AsyncIterator[Exchange]:
    """A connection to the server at a Unix socket."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise Broken(str(error)) from error
    try:
        yield Exchange(reader, writer)
    finally:
        writer.transport.abort()


async def fetch(path: str, method: bytes, target: bytes, headers: Headers = (), body: bytes = b"") -> tuple[int, bytes]:
    """A whole answer: its status and body. Broken: there is none, or it is longer than `_LONGEST`."""
    async with connected(path) as exchange:
        named = [(b"host", b"replica"), *headers, (b"content-length", b"%d" % len(body))]
        await exchange.send(method, target, named, body)
        status, pieces, size = (await exchange.head()).status_code, [], 0
        while data := await exchange.data():
            pieces.append(data)
            size += len(data)
            if size > _LONGEST:
                raise Broken("the answer is too long")
        return status, b"".join(pieces)
