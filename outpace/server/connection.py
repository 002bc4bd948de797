"""uvicorn's HTTP/1.1 protocol, with an end for requests that never end."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def limited(seconds: float, most: int, connections: int) -> type[H11Protocol]:
    """The protocol for `uvicorn.Config(http=...)`: how long a head, and then a body, may take, and their bytes.

    connections: so many may be open; one more is closed before it can say anything.

    uvicorn itself waits without end for the rest of a head, or of a body that nobody wants any more. The app counts
    what is in a body; here the bytes that carry it count: three megabytes of chunks of one byte are half a minute of
    work.
    """

    class Limited(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _awaited: Any = None  # the state of the client that the deadline is for
        _received = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > connections:
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
