"""A thread of the first rank that watches the others: their messages, their output, their end."""

import contextlib
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from outpace.log import logger
from outpace.ranks.door import BEAT, PING, Arrived, Door, Node
from outpace.ranks.messages import Failed, Frames, Here, Loaded, Sender, ToLeader, Unreadable, frame
from outpace.ranks.network import received
from outpace.ranks.node_messages import End, Ended, Leaving, Serving
from outpace.ranks.process import Written, end_of, watched
from outpace.ranks.world import free

FIRST_HAND = 2.0  # seconds to wait, after a rank's collective failed, for the rank that knows the cause
GOODBYE = 2.0  # seconds for other nodes to close their connections after they were told to end
TICK = 0.25  # seconds between checks of links to other nodes
Kind = TypeVar("Kind")


@dataclass(eq=False)
class Follower:
    """A rank as the first one sees it."""

    rank: int
    process: "subprocess.Popen[bytes] | None"
    """None: it is on another node."""
    socket: socket.socket
    sender: Sender
    frames: Frames[ToLeader] = field(default_factory=lambda: Frames(ToLeader))
    node: Node | None = None
    written: Written | None = None
    heard: float = field(default_factory=time.monotonic)
    here: Here | None = None
    loaded: Loaded | None = None
    failed: Failed | None = None
    """Its last message, if it failed."""
    gone: bool = False

    def __post_init__(self) -> None:
        if self.process is not None:
            assert self.process.stdout is not None, "it is piped"
            self.written = Written(self.rank, self.process.stdout)

    @property
    def explained(self) -> bool:
        """Whether the reason for its end is known, or will never be known."""
        return self.failed is not None or self.node is None or self.rank in self.node.ended or self.node.gone

    def end(self) -> str:
        """How it ended, in words."""
        if self.failed is not None:
            return f"failed: {self.failed.message}"
        if self.process is not None and self.written is not None:
            return end_of(self.process, self.written)
        assert self.node is not None, "it has a process or a node"
        return self.node.ended.get(self.rank, "closed its connection")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        else:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Watch:
    """Watches all other ranks until they end. If one ends without being told to, all others are ended too."""

    def __init__(
        self,
        followers: list[Follower],
        lost: Callable[[str], None],
        door: Door | None = None,
        cut: Callable[[], None] = free,
    ) -> None:
        """lost: called in this thread with the first cause, once no other rank is left.

        door: where other nodes connect; their ranks are added to `followers`. cut: aborts collectives of this process.
        """
        self._followers, self._lost, self._door, self._cut = followers, lost, door, cut
        self._changed = threading.Condition()
        self._second_hand: tuple[float, Follower] | None = None
        self._next_beat = self._patience = 0.0
        self.closing = False
        """They have been told to end, so their end is no failure."""
        self.cause: str | None = None
        """Why the other ranks have ended."""
        self.failed: Failed | None = None
        """The last message of the rank that failed first."""
        self._selector = selectors.DefaultSelector()
        for each in followers:
            self._add(each)
        if door is not None:
            self._on(door.listener, self._knock)
        self.thread = threading.Thread(target=self._run, name="outpace ranks", daemon=True)
        self.thread.start()

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `ready()`, the loss of the others, or a timeout; returns `ready()`."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self.cause is not None, seconds)
            return ready()

    @property
    def nodes(self) -> list[Node]:
        return [] if self._door is None else [node for node in list(self._door.nodes.values()) if not node.gone]

    @property
    def sockets(self) -> frozenset[str]:
        """The system's names of the sockets to other ranks and nodes."""
        links = [each.socket for each in self._followers]
        links += [] if self._door is None else [node.socket for node in self._door.nodes.values()]
        return frozenset(f"socket:[{os.fstat(each.fileno()).st_ino}]" for each in links)

    def serving(self) -> None:
        """Tell other nodes that all ranks have loaded the model."""
        for node in self.nodes:
            node.sender.send_small(frame(Serving()))

    def dismiss(self, cause: str | None) -> None:
        """Tell other nodes that the ranks end. Thread-safe."""
        for node in self.nodes:
            node.sender.send_small(frame(End(cause)))
            with contextlib.suppress(OSError):
                node.socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill all other ranks at once. Thread-safe."""
        for each in list(self._followers):
            each.kill()
        for node in self.nodes:
            with contextlib.suppress(OSError):
                node.socket.shutdown(socket.SHUT_RDWR)

    def _on(self, file: socket.socket | int, act: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _add(self, follower: Follower) -> None:
        follower.socket.setblocking(True)
        self._on(follower.socket, partial(self._hear, follower))
        if follower.process is None or follower.written is None:
            return
        self._on(follower.written.file.fileno(), partial(self._forward, follower))
        if (fd := watched(follower.process.pid)) is not None:
            # the socket closes too, unless a child holds a copy
            self._on(fd, partial(self._ended, follower, fd))

    def _run(self) -> None:
        while not self._over():
            for key, _ in self._selector.select(self._timeout()):
                if key.fileobj in self._selector.get_map():  # the previous event may have been its last
                    key.data()
            self._ask_second_hand()
            if self._door is not None:
                self._look_at_links(self._door)
            with self._changed:
                self._changed.notify_all()
        self._close()
        if self.cause is not None and not self.closing:
            logger.error("%s", self.cause)
            self._lost(self.cause)

    def _over(self) -> bool:
        if self._door is not None and not self.closing and self.cause is None:
            return False
        return all(each.gone for each in self._followers) and not self.nodes

    def _timeout(self) -> float | None:
        if self._door is not None:
            return TICK
        return None if self._second_hand is None else max(0.0, self._second_hand[0] - time.monotonic())

    def _ask_second_hand(self) -> None:
        """Stop waiting for a rank that knows the cause, if none is left or the time is up."""
        if self._second_hand is None:
            return
        until, follower = self._second_hand
        silent = follower.failed is None and follower.explained
        if silent or all(each.gone for each in self._followers) or time.monotonic() >= until:
            self._lose_rank(follower)

    def _hear(self, follower: Follower) -> None:
        """Read messages, or the end of the socket, which follows the last message."""
        data = received(follower.socket)
        follower.heard = time.monotonic()
        for message in _read(follower.frames, data):
            if isinstance(message, Here):
                follower.here = message
            elif isinstance(message, Loaded):
                follower.loaded = message
            elif isinstance(message, Failed):
                follower.failed = message
        if not data:
            self._selector.unregister(follower.socket)
            self._go(follower)

    def _ended(self, follower: Follower, fd: int) -> None:
        """A rank's process has ended."""
        self._selector.unregister(fd)
        os.close(fd)
        follower.socket.setblocking(False)  # read its last messages first
        while not follower.gone and follower.socket in self._selector.get_map():
            self._hear(follower)

    def _forward(self, follower: Follower) -> None:
        """Show a rank's output and keep the last lines."""
        if follower.written is not None and not follower.written.forward():
            self._selector.unregister(follower.written.file.fileno())

    def _go(self, follower: Follower) -> None:
        """A rank has ended. If another ended first, wait for that one's report; if it was silent, for its node's."""
        follower.gone = True
        if self.closing or self.cause is not None:
            return
        if not follower.explained or (follower.failed is not None and follower.failed.second_hand):
            self._second_hand = self._second_hand or (time.monotonic() + FIRST_HAND, follower)
            return
        self._lose_rank(follower)

    def _lose_rank(self, follower: Follower) -> None:
        """The first rank to end is the cause: end all others now."""
        self._second_hand = None
        if self.cause is not None:
            return
        if follower.written is not None and follower.written.file.fileno() in self._selector.get_map():
            self._forward(follower)
        where = "" if follower.node is None else f" on {follower.node.name}"
        self._lose(f"rank {follower.rank} of {self._size}{where} {follower.end()}", follower.failed)

    def _lose(self, cause: str, failed: Failed | None = None) -> None:
        if self.cause is not None or self.closing:
            return
        with self._changed:
            self.failed, self.cause = failed, f"{cause}; the other ranks were ended"
        self._patience = time.monotonic() + GOODBYE
        self.dismiss(self.cause)
        for each in self._followers:
            each.kill()
        self._cut()

    @property
    def _size(self) -> int:
        return len(self._followers) + 1 if self._door is None else self._door.wanted.size

    def _knock(self) -> None:
        assert self._door is not None, "called only for events of the door"
        if (sock := self._door.accept()) is not None:
            self._on(sock, partial(self._hear_stranger, self._door, sock))

    def _hear_stranger(self, door: Door, sock: socket.socket) -> None:
        came = door.hear(sock)
        if came is True:
            return
        self._selector.unregister(sock)
        if isinstance(came, Node):
            self._on(came.socket, partial(self._hear_node, came))
        elif isinstance(came, Arrived):
            follower = Follower(came.rank, None, came.socket, Sender(came.socket), came.frames, came.node)
            self._followers.append(follower)
            self._add(follower)

    def _hear_node(self, node: Node) -> None:
        data = received(node.socket)
        node.heard = time.monotonic()
        for message in _read(node.frames, data):
            if isinstance(message, Ended):
                node.ended[message.rank] = message.how
            elif isinstance(message, Leaving):
                node.leaving = message.why
        if not data:
            self._lose_node(node, node.leaving or "closed its connection")

    def _lose_node(self, node: Node, how: str) -> None:
        node.gone = True
        if node.socket in self._selector.get_map():
            self._selector.unregister(node.socket)
        if self._second_hand is None or self._second_hand[1].node is not node or not node.ended:
            self._lose(f"{node.name} {how}")

    def _look_at_links(self, door: Door) -> None:
        """Send heartbeats, and find links without any."""
        now, limit = time.monotonic(), door.wanted.link_timeout
        for sock in door.late():
            self._selector.unregister(sock)
        far = [each for each in self._followers if each.node is not None and not each.gone]
        if now >= self._next_beat:
            self._next_beat = now + min(BEAT, limit / 4)
            for sender in [*(node.sender for node in self.nodes), *(each.sender for each in far)]:
                sender.send_small(PING)
        for node in self.nodes:
            if now - node.heard > limit:
                self._lose(f"no message from {node.name} for {limit:g} s: the machine or the link to it is down")
        for each in far:
            if each.here is not None and now - each.heard > limit and each.node is not None:  # imports may take long
                self._lose(f"no message from rank {each.rank} on {each.node.name} for {limit:g} s: it hangs")
        if self.cause is not None and now >= self._patience:
            self._give_up_links(far)

    def _give_up_links(self, far: list[Follower]) -> None:
        """Drop links to other nodes: their time to close is over."""
        for node in self.nodes:
            self._lose_node(node, "did not answer")
        for each in far:
            each.gone = True

    def _close(self) -> None:
        for each in self._followers:
            each.socket.close()
            if each.process is None or each.written is None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(1.0)  # its socket has ended, so its process is about to
            each.process.kill()
            each.process.wait()
            each.written.file.close()
        if self._door is not None:
            for node in self._door.nodes.values():
                node.socket.close()
            self._door.close()
        self._selector.close()


def _read(frames: Frames[Kind], data: bytes) -> list[Kind]:
    """Messages; unreadable ones are dropped."""
    with contextlib.suppress(Unreadable):
        return frames.feed(data)
    return []
