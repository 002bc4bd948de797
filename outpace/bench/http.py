"""A small HTTP/1.1 client for load tests: parsing an event takes a few microseconds.

General clients take ten times as long for each event of a stream, and a busy client would measure itself.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from outpace.errors import InputError

Receive = Callable[[bytes], None]
"""Called with each piece of a body as it comes."""
_READ = 1 << 16  # bytes that are read at once


class Response:
    """One response, parsed as its bytes come."""

    def __init__(self, receive: Receive) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By their names in lower case."""
        self.done = False
        self.keeps_alive = True
        self._receive = receive
        self._buffer = bytearray()
        self._left: int | None = None
        """Bytes of the body that are still to come; None: until the connection ends."""
        self._chunked = False

    def feed(self, data: bytes) -> None:
        """Parse bytes; raises ValueError or IndexError if they are not HTTP/1.1."""
        self._buffer += data
        if not self.status and not self._head():
            return
        if self._chunked:
            self._chunks()
        else:
            self._plain()

    def end(self) -> bool:
        """The connection has ended; returns whether the response is complete."""
        if self.status and not self._chunked and self._left is None:
            self.done = True
        return self.done

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        status = int(first.split(" ", 2)[1])
        if 100 <= status < 200:
            return self._head()
        pairs = (line.partition(":") for line in lines)
        headers = self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status = status
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._left = None if length is None or self._chunked else int(length)
        is_open = headers.get("connection", "").lower() != "close"
        self.keeps_alive = is_open and (self._chunked or self._left is not None)
        return True

    def _plain(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        if data:
            self._receive(data)
        if self._left is not None:
            self._left -= len(data)
            self.done = self._left == 0
            if self._left < 0:
                raise ValueError("the body is longer than its content-length")

    def _chunks(self) -> None:
        """Whole chunks: size in hex, CRLF, data, CRLF; one of size 0 is the last."""
        buffer, begin = self._buffer, 0
        while True:
            line = buffer.find(b"\r\n", begin)
            if line < 0:
                break
            size = int(bytes(buffer[begin:line]).partition(b";")[0], 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            if not size:
                self.done = True
                break
            self._receive(bytes(buffer[line + 2 : end]))
            begin = end + 2
        del buffer[:begin]


class Pool:
    """Connections to one server, kept open."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise InputError(f"url: expected http://host:port or https://..., got {url!r}")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        lines = [f"{name}: {value}" for name, value in {"host": parts.netloc.rpartition("@")[2], **headers}.items()]
        self._headers = "\r\n".join(lines)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes, receive: Receive) -> int:
        """POST JSON; returns the status after the whole answer."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}\r\ncontent-type: application/json\r\n"
        reader, writer = await self._connection()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        response = Response(receive)
        try:
            while not response.done:
                if data := await reader.read(_READ):
                    response.feed(data)
                elif not response.end():
                    raise ConnectionError("the server closed the connection")
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, ValueError | IndexError):
                raise ConnectionError(f"the server does not speak HTTP/1.1 ({error})") from None
            raise
        if response.keeps_alive:
            self._idle.append((reader, writer))
        else:
            writer.close()
        return response.status

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    def close(self) -> None:
        """Close the idle connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()
