"""uvicorn's HTTP/1.1 protocol with timeouts for slow heads and bodies, and limits of connections and bytes."""

import asyncio
import ipaddress
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def limited(seconds: float, most: int, connections: int, each: int) -> type[H11Protocol]:
    """The protocol for `uvicorn.Config(http=...)`.

    seconds: how long a head may take, and then a body; most: bytes of both. connections: how many may be open in all;
    each: how many from one address. One more is closed at once.

    uvicorn has no timeout for the rest of a head, or of a body that no route reads. The app limits what is in a body;
    here the bytes on the wire are limited, because three megabytes of one-byte chunks are half a minute of work.
    """

    held: Counter[str] = Counter()  # open connections by address

    class Limited(H11Protocol):
        _address = ""
        _deadline: asyncio.TimerHandle | None = None
        _awaited: Any = None  # the state of the client that the deadline is for
        _received = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._address = network_of(self.client[0] if self.client else "")
            held[self._address] += 1
            if len(self.connections) > connections or held[self._address] > each:
                transport.close()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)
            self._watch()
            if self._received > most:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            held[self._address] -= 1
            if not held[self._address]:
                del held[self._address]
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            state = self.conn.their_state
            if state not in (h11.IDLE, h11.SEND_BODY):
                self._forget()
                self._received = 0
            elif state is not self._awaited:
                self._forget()
                # the app's own deadline for a body comes first, with an answer
                later = seconds if state is h11.IDLE else seconds + 1
                self._deadline, self._awaited = self.loop.call_later(later, self.transport.close), state

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._awaited = None

    return Limited


def network_of(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 network of an IPv6 address, which one client owns."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return host if address.is_loopback else str(ipaddress.ip_network((address, 64), strict=False))
