"""The listening socket of node 0, where other nodes and their ranks connect.

A connection is a stranger until its first message has been read, which must be short and arrive soon. Strangers use
hardly any memory and do not disturb others.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.log import logger
from outpace.ranks.messages import Frames, Ping, Sender, ToLeader, Unreadable, frame
from outpace.ranks.network import watch_over
from outpace.ranks.node_messages import (
    LONGEST_HELLO,
    PROTOCOL,
    Accepted,
    Arrive,
    FromNode,
    Hello,
    Join,
    Refused,
)

HELLO = 5.0  # seconds for a stranger's first message
STRANGERS = 64  # strangers at a time; more are refused
BEAT = 2.0  # seconds between heartbeats
PING = frame(Ping())
_ONE_LINE = 500  # most characters of a remote message that are shown


@dataclass(frozen=True, slots=True)
class Wanted:
    """What node 0 requires of the other nodes."""

    nnodes: int
    size: int
    """Ranks of all nodes."""
    versions: Mapping[str, str]
    gpus: int | None
    """GPUs that each node must have; None: none."""
    options: Mapping[str, Any]
    """All engine options."""
    link_timeout: float

    @property
    def per_node(self) -> int:
        return self.size // self.nnodes

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def problem(self, join: Join) -> str | None:
        """Why this node cannot take part; None: it can."""
        if join.protocol != PROTOCOL:
            return f"speaks protocol {join.protocol}, node 0 {PROTOCOL}; install the same version of Outpace on all"
        if join.nnodes != self.nnodes:
            return f"was started with nnodes={join.nnodes}, node 0 with {self.nnodes}; give all of them the same"
        for name, value in self.versions.items():
            if (found := join.versions.get(name)) != value:
                return f"has {name} {found}, node 0 has {value}; install the same on all"
        if self.gpus is not None and (join.gpus or 0) < self.gpus:
            return f"has {join.gpus or 0} GPUs for {self.gpus} ranks; ask for fewer ranks, or for more nodes"
        if (different := _difference(join.options, self.options)) is not None:
            name, theirs, ours = different
            return f"was given {name}={theirs}, node 0 has {ours}; set it to the same on all, or only on node 0"
        return None


def _difference(theirs: Any, ours: Any, path: str = "") -> tuple[str, str, str] | None:
    """The first option that differs between nodes: its name and both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = (_difference(value, ours.get(name), f"{path}.{name}") for name, value in theirs.items())
        return next((each for each in found if each is not None), None)
    return None if theirs == ours else (path[1:], repr(theirs)[:_ONE_LINE], repr(ours)[:_ONE_LINE])


@dataclass(eq=False)
class Node:
    """Another node, as node 0 sees it."""

    number: int
    address: str
    model: str | None
    socket: socket.socket
    sender: Sender
    ranks: range
    frames: Frames[FromNode] = field(default_factory=lambda: Frames(FromNode, LONGEST_HELLO))
    heard: float = field(default_factory=time.monotonic)
    ended: dict[int, str] = field(default_factory=dict)
    """How its ranks ended, as the node reported."""
    leaving: str | None = None
    gone: bool = False

    @property
    def name(self) -> str:
        """A name for messages."""
        return f"node {self.number} ({self.address})"


@dataclass(eq=False)
class Arrived:
    """The connection of a rank on another node."""

    rank: int
    node: Node
    socket: socket.socket
    frames: Frames[ToLeader] = field(default_factory=lambda: Frames(ToLeader))


@dataclass(eq=False)
class _Stranger:
    socket: socket.socket
    address: str
    until: float
    frames: Frames[Hello] = field(default_factory=lambda: Frames(Hello, LONGEST_HELLO))


class Door:
    """The listening socket of node 0 and who connected. Used by the watching thread; others only read the results."""

    def __init__(self, listener: socket.socket, wanted: Wanted) -> None:
        self.listener, self.wanted = listener, wanted
        listener.setblocking(False)
        self.key = secrets.token_hex(16)
        """A secret that nodes pass to their ranks."""
        self.nodes: dict[int, Node] = {}
        self.problem: str | None = None
        """Why the engine cannot start with a node that joined."""
        self.open = True
        """Whether nodes may still join."""
        self.turned_away: dict[str, str] = {}
        """The last reason for a refusal, by address, for the timeout's error."""
        self._strangers: dict[socket.socket, _Stranger] = {}

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined."""
        return [number for number in range(1, self.wanted.nnodes) if number not in self.nodes]

    def accept(self) -> socket.socket | None:
        """Accept a connection; None: there is none, or there are too many."""
        try:
            sock, address = self.listener.accept()
        except OSError:
            return None
        if len(self._strangers) >= STRANGERS:
            sock.close()
            return None
        sock.setblocking(False)
        self._strangers[sock] = _Stranger(sock, str(address[0]), time.monotonic() + HELLO)
        return sock

    def hear(self, sock: socket.socket) -> Node | Arrived | bool:
        """Read from a stranger; returns the node or rank that it is. True: not known yet; False: it was refused."""
        stranger = self._strangers[sock]
        try:
            data = sock.recv(LONGEST_HELLO)
            messages = stranger.frames.feed(data)
        except BlockingIOError:
            return True
        except (OSError, Unreadable):
            return self._drop(sock, "it does not speak the protocol of a node")
        if not data:
            return self._drop(sock)
        return self._greet(stranger, messages[0]) if messages else True

    def late(self) -> list[socket.socket]:
        """Refuse strangers whose time is up."""
        over = [each.socket for each in self._strangers.values() if time.monotonic() >= each.until]
        for sock in over:
            self._drop(sock, "it sent no first message in time")
        return over

    def close(self) -> None:
        for sock in [self.listener, *self._strangers]:
            sock.close()

    def _greet(self, stranger: _Stranger, hello: Hello) -> Node | Arrived | bool:
        if isinstance(hello, Arrive):
            return self._arrive(stranger, hello)
        if (refused := self._refused(stranger, hello)) is not None:
            with contextlib.suppress(OSError):
                stranger.socket.send(frame(refused))
            return self._drop(stranger.socket, refused.reason)
        sock = self._let_in(stranger)
        ranks = self.wanted.ranks_of(hello.node_rank)
        node = Node(hello.node_rank, stranger.address, hello.model, sock, Sender(sock), ranks)
        self.nodes[node.number] = node
        logger.info("%s has joined, for ranks %s", node.name, list(ranks))
        return node

    def _refused(self, stranger: _Stranger, join: Join) -> Refused | None:
        wanted, rank = self.wanted, join.node_rank
        if not self.open:
            return Refused("node 0 has all its nodes already; no other can join now", again=True)
        if (problem := wanted.problem(join)) is not None:
            self.problem = self.problem or f"node {rank} ({stranger.address}) {problem}"
            return Refused(self.problem)
        if not 0 < rank < wanted.nnodes:
            return Refused(f"there is no node {rank}: give --node-rank 1 to {wanted.nnodes - 1}")
        if rank in self.nodes:
            there = self.nodes[rank].address
            return Refused(f"node {rank} has joined from {there} already; give each its own --node-rank", again=True)
        return None

    def _arrive(self, stranger: _Stranger, hello: Arrive) -> Arrived | bool:
        node = next((each for each in self.nodes.values() if hello.rank in each.ranks), None)
        if node is None or hello.protocol != PROTOCOL or not hmac.compare_digest(hello.key, self.key):
            return self._drop(stranger.socket, "a rank that was not asked for")
        return Arrived(hello.rank, node, self._let_in(stranger))

    def _let_in(self, stranger: _Stranger) -> socket.socket:
        sock = stranger.socket
        del self._strangers[sock]
        sock.setblocking(True)
        watch_over(sock, self.wanted.link_timeout)
        with contextlib.suppress(OSError):  # it is gone: its reader will notice
            sock.send(frame(Accepted(self.wanted.link_timeout)))
        return sock

    def _drop(self, sock: socket.socket, reason: str = "") -> bool:
        stranger = self._strangers.pop(sock)
        if reason:
            logger.warning("%s was refused: %s", stranger.address, reason)
            if len(self.turned_away) < STRANGERS:
                self.turned_away[stranger.address] = reason
        sock.close()
        return False
