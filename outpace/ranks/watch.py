"""A thread of the first rank that sees what becomes of the others: what they say, what they write, how they end."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from outpace.log import logger
from outpace.ranks.messages import Failed, Frames, Here, Loaded, Sender, ToLeader
from outpace.ranks.world import free

FIRST_HAND = 2.0  # seconds that a rank whose collective failed waits for the one that knows why
LAST_LINES = 6  # of what a rank wrote, if it did not say why it ends
_AT_ONCE = 1 << 16  # bytes to read at a time


@dataclass(eq=False)
class Follower:
    """A rank as the first one sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    sender: Sender
    frames: Frames[ToLeader] = field(default_factory=lambda: Frames(ToLeader))
    here: Here | None = None
    loaded: Loaded | None = None
    said: Failed | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    unfinished: bytes = b""
    """The line that it writes."""
    gone: bool = False

    @property
    def errors(self) -> IO[bytes]:
        """What it writes."""
        assert self.process.stdout is not None, "it is piped"
        return self.process.stdout

    def end(self) -> str:
        """How it ended, in words."""
        if self.said is not None:
            return f"failed: {self.said.message}"
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return how + (f"; it last wrote: {' / '.join(self.lines)}" if self.lines else "")


class Watch:
    """Watches all other ranks until they have ended. If one ends that was not told to, all others are ended too."""

    def __init__(self, followers: list[Follower], lost: Callable[[str], None]) -> None:
        """`lost` is called in this thread with the first cause, once no other rank is left."""
        self._followers, self._lost = followers, lost
        self._changed = threading.Condition()
        self._second_hand: tuple[float, Follower] | None = None
        self.closing = False
        """They are told to end: that is no loss."""
        self.cause: str | None = None
        """Why there are no other ranks any more."""
        self.failed: Failed | None = None
        """What the rank that was the cause said itself."""
        self._selector = selectors.DefaultSelector()
        for each in followers:
            each.socket.setblocking(True)
            os.set_blocking(each.errors.fileno(), False)
            self._selector.register(each.socket, selectors.EVENT_READ, (each, self._hear))
            self._selector.register(each.errors, selectors.EVENT_READ, (each, self._forward))
            with contextlib.suppress(AttributeError, OSError):  # the socket tells too, unless a child has a copy of it
                fd = os.pidfd_open(each.process.pid)
                self._selector.register(fd, selectors.EVENT_READ, (each, self._ended))
        self.thread = threading.Thread(target=self._run, name="outpace ranks", daemon=True)
        self.thread.start()

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `ready`, the others are lost, or so long; whether it is ready."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self.cause is not None, seconds)
            return ready()

    def _run(self) -> None:
        while not all(each.gone for each in self._followers):
            timeout = None if self._second_hand is None else max(0.0, self._second_hand[0] - time.monotonic())
            events = self._selector.select(timeout)
            for key, _ in events:
                follower, act = key.data
                if key.fileobj in self._selector.get_map():  # the event before may have been its last
                    act(follower, key)
            nobody_else = all(each.gone for each in self._followers)
            if self._second_hand is not None and (nobody_else or time.monotonic() >= self._second_hand[0]):
                self._lose(self._second_hand[1])
            with self._changed:
                self._changed.notify_all()
        self._close()
        if self.cause is not None and not self.closing:
            logger.error("%s", self.cause)
            self._lost(self.cause)

    def _hear(self, follower: Follower, key: selectors.SelectorKey) -> None:
        """Messages, or the end of the socket, which comes behind the last of them."""
        try:
            data = follower.socket.recv(_AT_ONCE)
        except OSError:
            data = b""
        for message in follower.frames.feed(data):
            if isinstance(message, Here):
                follower.here = message
            elif isinstance(message, Loaded):
                follower.loaded = message
            else:
                follower.said = message
        if not data:
            self._selector.unregister(follower.socket)
            self._go(follower)

    def _ended(self, follower: Follower, key: selectors.SelectorKey) -> None:
        """Its process has ended."""
        self._selector.unregister(key.fd)
        os.close(key.fd)
        follower.socket.setblocking(False)  # what it has said is here
        while not follower.gone and follower.socket in self._selector.get_map():
            self._hear(follower, key)

    def _forward(self, follower: Follower, key: selectors.SelectorKey) -> None:
        """Show what a rank writes, and keep the last lines."""
        try:
            data = os.read(follower.errors.fileno(), _AT_ONCE)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(follower.errors)
        *lines, follower.unfinished = (follower.unfinished + data).split(b"\n")
        for text in (line.decode(errors="replace") for line in lines):
            follower.lines.append(text[:500])
            with contextlib.suppress(Exception):  # nobody has to be there to read it
                sys.stderr.write(f"rank {follower.rank}: {text}\n")

    def _go(self, follower: Follower) -> None:
        """A rank has ended. If it only knows that another has, that one is waited for."""
        follower.gone = True
        if self.closing or self.cause is not None:
            return
        if follower.said is not None and follower.said.second_hand:
            self._second_hand = self._second_hand or (time.monotonic() + FIRST_HAND, follower)
            return
        self._lose(follower)

    def _lose(self, follower: Follower) -> None:
        """The first rank to end is the cause: all others end now."""
        self._second_hand = None
        if self.cause is not None:
            return
        if follower.errors in self._selector.get_map():
            self._forward(follower, self._selector.get_key(follower.errors))
        size = len(self._followers) + 1
        with self._changed:
            self.failed = follower.said
            self.cause = f"rank {follower.rank} of {size} {follower.end()}; the other ranks were ended"
        for each in self._followers:
            each.process.kill()
        free()

    def _close(self) -> None:
        for each in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(1.0)  # its socket has ended, so it is about to
            each.process.kill()
            each.process.wait()
            each.socket.close()
            each.errors.close()
        self._selector.close()
