"""A thread of the first rank that sees what becomes of the others: what they say, what they write, how they end."""

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
from outpace.ranks.node_messages import End, Ended, Leaving, Serving
from outpace.ranks.process import Written, end_of, watched
from outpace.ranks.world import free

FIRST_HAND = 2.0  # seconds that a rank whose collective failed waits for the one that knows why
GOODBYE = 2.0  # seconds that other nodes have to close their connections after they were told to end
TICK = 0.25  # seconds between looks at links to other nodes
_AT_ONCE = 1 << 16  # bytes to read at a time
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
    said: Failed | None = None
    gone: bool = False

    def __post_init__(self) -> None:
        if self.process is not None:
            assert self.process.stdout is not None, "it is piped"
            self.written = Written(self.rank, self.process.stdout)

    @property
    def explained(self) -> bool:
        """Whether it is known how it ended, or nobody is left to ask."""
        return self.said is not None or self.node is None or self.rank in self.node.ended or self.node.gone

    def end(self) -> str:
        """How it ended, in words."""
        if self.said is not None:
            return f"failed: {self.said.message}"
        if self.process is not None and self.written is not None:
            return end_of(self.process, self.written)
        assert self.node is not None, "it has a process or a node"
        return self.node.ended.get(self.rank, "closed its connection")

    def kill(self) -> None:
        """End it, wherever it is."""
        if self.process is not None:
            self.process.kill()
        else:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Watch:
    """Watches all other ranks until they have ended. If one ends that was not told to, all others are ended too."""

    def __init__(
        self,
        followers: list[Follower],
        lost: Callable[[str], None],
        door: Door | None = None,
        cut: Callable[[], None] = free,
    ) -> None:
        """`lost` is called in this thread with the first cause, once no other rank is left.

        door: where other nodes come in; their ranks are added to `followers`. cut: has collectives of this process end.
        """
        self._followers, self._lost, self._door, self._cut = followers, lost, door, cut
        self._changed = threading.Condition()
        self._second_hand: tuple[float, Follower] | None = None
        self._next_beat = self._patience = 0.0
        self.closing = False
        """They are told to end: that is no loss."""
        self.cause: str | None = None
        """Why there are no other ranks any more."""
        self.failed: Failed | None = None
        """What the rank that was the cause said itself."""
        self._selector = selectors.DefaultSelector()
        for each in followers:
            self._add(each)
        if door is not None:
            self._on(door.listener, self._knock)
        self.thread = threading.Thread(target=self._run, name="outpace ranks", daemon=True)
        self.thread.start()

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `ready`, the others are lost, or so long; whether it is ready."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self.cause is not None, seconds)
            return ready()

    @property
    def nodes(self) -> list[Node]:
        """The other nodes that are here."""
        return [] if self._door is None else [node for node in list(self._door.nodes.values()) if not node.gone]

    @property
    def sockets(self) -> frozenset[str]:
        """What the system calls the connections to other ranks and nodes."""
        links = [each.socket for each in self._followers]
        links += [] if self._door is None else [node.socket for node in self._door.nodes.values()]
        return frozenset(f"socket:[{os.fstat(each.fileno()).st_ino}]" for each in links)

    def serving(self) -> None:
        """Tell other nodes that all ranks have loaded the model."""
        for node in self.nodes:
            node.sender.send_small(frame(Serving()))

    def dismiss(self, cause: str | None) -> None:
        """Tell other nodes that the ranks end. For any thread."""
        for node in self.nodes:
            node.sender.send_small(frame(End(cause)))
            with contextlib.suppress(OSError):
                node.socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End all other ranks at once. For any thread."""
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
            # the socket tells too, unless a child has a copy of it
            self._on(fd, partial(self._ended, follower, fd))

    def _run(self) -> None:
        while not self._over():
            for key, _ in self._selector.select(self._timeout()):
                if key.fileobj in self._selector.get_map():  # the event before may have been its last
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
        """End the wait for somebody who knows more, if nobody is left to tell or it was long enough."""
        if self._second_hand is None:
            return
        until, follower = self._second_hand
        silent = follower.said is None and follower.explained
        if silent or all(each.gone for each in self._followers) or time.monotonic() >= until:
            self._lose_rank(follower)

    def _hear(self, follower: Follower) -> None:
        """Messages, or the end of the socket, which comes behind the last of them."""
        data = _received(follower.socket)
        follower.heard = time.monotonic()
        for message in _read(follower.frames, data):
            if isinstance(message, Here):
                follower.here = message
            elif isinstance(message, Loaded):
                follower.loaded = message
            elif isinstance(message, Failed):
                follower.said = message
        if not data:
            self._selector.unregister(follower.socket)
            self._go(follower)

    def _ended(self, follower: Follower, fd: int) -> None:
        """Its process has ended."""
        self._selector.unregister(fd)
        os.close(fd)
        follower.socket.setblocking(False)  # what it has said is here
        while not follower.gone and follower.socket in self._selector.get_map():
            self._hear(follower)

    def _forward(self, follower: Follower) -> None:
        """Show what a rank writes, and keep the last lines."""
        if follower.written is not None and not follower.written.forward():
            self._selector.unregister(follower.written.file.fileno())

    def _go(self, follower: Follower) -> None:
        """A rank has ended. If it only knows that another has, that one is waited for; of a silent one, its node."""
        follower.gone = True
        if self.closing or self.cause is not None:
            return
        if not follower.explained or (follower.said is not None and follower.said.second_hand):
            self._second_hand = self._second_hand or (time.monotonic() + FIRST_HAND, follower)
            return
        self._lose_rank(follower)

    def _lose_rank(self, follower: Follower) -> None:
        """The first rank to end is the cause: all others end now."""
        self._second_hand = None
        if self.cause is not None:
            return
        if follower.written is not None and follower.written.file.fileno() in self._selector.get_map():
            self._forward(follower)
        where = "" if follower.node is None else f" on {follower.node.name}"
        self._lose(f"rank {follower.rank} of {self._size}{where} {follower.end()}", follower.said)

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
        assert self._door is not None, "it is the door that was knocked at"
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
        data = _received(node.socket)
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
        """Send signs of life, and see who gives none."""
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
                self._lose(f"nothing was heard from {node.name} for {limit:g} s: the machine or the link to it is down")
        for each in far:
            if each.here is not None and now - each.heard > limit and each.node is not None:  # imports may take long
                self._lose(f"nothing was heard from rank {each.rank} on {each.node.name} for {limit:g} s: it hangs")
        if self.cause is not None and now >= self._patience:
            self._give_up_links(far)

    def _give_up_links(self, far: list[Follower]) -> None:
        """Other nodes had time to say goodbye."""
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
                each.process.wait(1.0)  # its socket has ended, so it is about to
            each.process.kill()
            each.process.wait()
            each.written.file.close()
        if self._door is not None:
            for node in self._door.nodes.values():
                node.socket.close()
            self._door.close()
        self._selector.close()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_AT_ONCE)
    except OSError:
        return b""


def _read(frames: Frames[Kind], data: bytes) -> list[Kind]:
    """Messages; what cannot be read says nothing."""
    with contextlib.suppress(Unreadable):
        return frames.feed(data)
    return []
