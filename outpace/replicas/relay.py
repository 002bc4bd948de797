"""Sends the answer of a replica to the client, and holds it until there is something whole to send."""

import h11
from starlette.types import Send

from outpace.replicas.upstream import HOP_BY_HOP, Broken, Exchange
from outpace.server.problems import LOST, ApiError, is_stream

HOLD = 2**20
"""Most bytes of an answer, or of one event of a stream, that are held; a longer one is sent as it comes."""
_REPLACED = HOP_BY_HOP | {b"date", b"x-request-id", b"x-content-type-options"}  # the router's own server sends them
_END = b"\n\n"  # of an event


class Held:
    """Bytes that have come and are not sent yet."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        """Add bytes that have come."""
        self._bytes += data

    def take(self, *, stream: bool) -> bytes:
        """Remove and return what can be sent now: whole events of a stream, or what is too long to be held."""
        if len(self._bytes) > HOLD:
            return self.rest()
        size = self._bytes.rfind(_END) + len(_END) if stream else 0
        if size < len(_END):
            return b""
        found = bytes(self._bytes[:size])
        del self._bytes[:size]
        return found

    def rest(self) -> bytes:
        """Remove and return all bytes."""
        found = bytes(self._bytes)
        self._bytes.clear()
        return found

    async def whole(self, exchange: Exchange) -> bytes:
        """Wait for the whole of a short answer; it stays held."""
        while len(self._bytes) <= HOLD and (data := await exchange.data()):
            self._bytes += data
        return bytes(self._bytes)


async def relay(exchange: Exchange, head: h11.Response, send: Send, held: Held) -> None:
    """Forward an answer. If it breaks off: Broken if nothing has been sent yet, ApiError otherwise."""
    headers = [(name, value) for name, value in head.headers if name not in _REPLACED]
    stream = is_stream(headers)
    begun = False
    try:
        while data := await exchange.data():
            held.add(data)
            if ready := held.take(stream=stream):
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
                await send({"type": "http.response.body", "body": ready, "more_body": True})
    except Broken:
        if not begun:
            raise
        raise ApiError(503, "the replica that answered has ended; try again", code=LOST, retry=True) from None
    if not begun:
        await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": held.rest()})
