"""The engine process's end of the socket: never waits for a reader, never holds more than one unsent frame."""

import select
import socket
import time

import msgspec

from outpace.server.messages import Frames, ToWorker, frame

_AT_ONCE = 1 << 18  # bytes to read at a time


class Channel:
    """Messages in, frames out. A new frame can be sent only when the one before has left."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poller = select.poll()
        self._poller.register(sock)
        self._frames = Frames()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._unsent = memoryview(b"")
        self.closed = False
        """The other side has gone."""

    @property
    def free(self) -> bool:
        """Whether a frame may be sent."""
        return not self._unsent

    def receive(self, *, wait: bool) -> list[ToWorker]:
        """Messages that have come. wait: sleep until there is one, or until more of the unsent frame can be sent."""
        messages: list[ToWorker] = []
        if not self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), None if wait else 0):
            return messages
        self._flush()
        if data := self._read():
            messages.extend(self._decoder.decode(body) for body in self._frames.feed(data))
        return messages

    def send(self, message: msgspec.Struct) -> None:
        """Begin to send a message; `receive` and `drain` send what the socket does not take now."""
        assert self.free, "the frame before has not left"
        self._unsent = memoryview(frame(message))
        self._flush()

    def drain(self, seconds: float) -> None:
        """Wait up to this many seconds for the reader to take what is unsent."""
        end = time.monotonic() + seconds
        while self._unsent and not self.closed and (left := end - time.monotonic()) > 0:
            self._poll(select.POLLOUT, left)
            self._flush()

    def _poll(self, events: int, seconds: float | None) -> bool:
        self._poller.modify(self._socket, events)
        return bool(self._poller.poll(None if seconds is None else 1e3 * seconds))

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_AT_ONCE)
        except BlockingIOError:
            return b""
        except ConnectionError:
            data = b""
        self.closed = not data
        return data

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
            self._unsent = memoryview(b"")
