"""The answer of a replica on its way to the client: held until there is something whole to send."""

import h11
from starlette.types import Send

from outpace.replicas.upstream import HOP_BY_HOP, Broken, Exchange
from outpace.server.problems import LOST, ApiError

HOLD = 2**20
"""Bytes of an answer, or of one event of a stream, that are held; of a longer one the rest is sent as it comes."""
_REPLACED = HOP_BY_HOP | {b"date", b"x-request-id", b"x-content-type-options"}  # the router's own server sends them
_END = b"\n\n"  # of an event


class Held:
    """Bytes that have come and have not been sent."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        """More has come."""
        self._bytes += data

    def take(self, *, stream: bool) -> bytes:
        """What may be sent now: whole events of a stream, or what is too long to be held."""
        if len(self._bytes) > HOLD:
            return self.rest()
        size = self._bytes.rfind(_END) + len(_END) if stream else 0
        if size < len(_END):
            return b""
        found = bytes(self._bytes[:size])
        del self._bytes[:size]
        return found

    def rest(self) -> bytes:
        """All of it."""
        found = bytes(self._bytes)
        self._bytes.clear()
        return found

    async def whole(self, exchange: Exchange) -> bytes:
        """All that a short answer consists of; it stays held."""
        while len(self._bytes) <= HOLD and (data := await exchange.data()):
            self._bytes += data
        return bytes(self._bytes)


async def relay(exchange: Exchange, head: h11.Response, send: Send, held: Held) -> None:
    """Send an answer on. Broken: nothing has been sent yet; an error: something has, and no more will come."""
    headers = [(name, value) for name, value in head.headers if name not in _REPLACED]
    stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
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
