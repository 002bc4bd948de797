"""The agent of every machine but the first: joins node 0, starts the ranks node 0 asks for, and watches them. No torch.

It ends when node 0 ends. If node 0 is lost after the model was served, it waits for a new node 0 and joins it.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from outpace.config.llm import LLMConfig
from outpace.errors import EngineDead, OutpaceError
from outpace.log import logger
from outpace.ranks.messages import Frames, Ping, Pong, Sender, Unreadable, frame
from outpace.ranks.network import Place, connect, place_of, watch_over
from outpace.ranks.node_messages import (
    LONGEST_HELLO,
    PROTOCOL,
    Accepted,
    Arrive,
    End,
    Ended,
    Join,
    Leaving,
    Refused,
    Serving,
    StartRanks,
    ToNode,
)
from outpace.ranks.process import Written, end_of, start, versions, watched

ANSWER = 5.0  # seconds to wait for node 0's answer
TRY_EVERY = 0.5  # seconds between attempts to reach node 0
SAY_EVERY = 5.0  # seconds between log lines while waiting
TICK = 0.25  # seconds between checks
GOODBYE = 2.0  # seconds for ranks to end by themselves
_AT_ONCE = 1 << 16
_PONG = frame(Pong())
_NOT_HERE = {"device", "nodes"}
"""Options that may differ between nodes."""


class Stopped(Exception):
    """A signal asked this node to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"was stopped by {signal.Signals(number).name}")
        self.number = number


class Lost(OutpaceError):
    """Node 0 ended or is unreachable."""


@dataclass(eq=False)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    written: Written = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        assert self.process.stdout is not None, "it is piped"
        self.written = Written(self.number, self.process.stdout)


class Agent:
    """A node other than the first."""

    def __init__(self, model: str | None, config: LLMConfig) -> None:
        nodes = self._nodes = config.nodes
        self._place: Place = place_of(nodes)
        options = all_options(config, exclude_unset=True)
        self._join = Join(PROTOCOL, nodes.nnodes, nodes.node_rank, versions(), gpus(config), model, options)
        self._served = False

    def run(self) -> None:
        """Work for node 0 until it ends; raises on failure."""
        while True:
            with self._joined() as session:
                try:
                    session.run()
                    return
                except Lost as lost:
                    self._served |= session.served
                    if not self._served:
                        raise EngineDead(str(lost)) from None
                    wait = self._nodes.join_timeout
                    logger.error("%s; waiting %g s for node 0 to come back", lost, wait)

    @contextlib.contextmanager
    def _joined(self) -> Iterator["Session"]:
        """Wait for node 0 and open a session with it."""
        sock, timeout = self._reach()
        session = Session(sock, timeout, self._place, self._join.node_rank)
        try:
            yield session
        except Stopped as stopped:
            session.leave(str(stopped))
            raise
        finally:
            session.close()

    def _reach(self) -> tuple[socket.socket, float]:
        place, began = self._place, time.monotonic()
        until, say_at, problem = began + self._nodes.join_timeout, began + SAY_EVERY, ""
        while True:
            try:
                return hello(place, self._join, min(ANSWER, max(0.1, until - time.monotonic())))
            except RefusedError as refused:
                if not (self._served and refused.again):
                    raise EngineDead(
                        f"node 0 at {place.master} port {place.port} refuses this node: {refused}"
                    ) from None
                problem = str(refused)
            except (OSError, Unreadable) as error:
                problem = str(error) or type(error).__name__
            now = time.monotonic()
            if now >= until:
                raise EngineDead(
                    f"node 0 at {place.master} port {place.port} did not accept this node "
                    f"within {self._nodes.join_timeout:g} s ({problem}); start it there, or check master_addr, "
                    "master_port and the link"
                )
            if now >= say_at:
                say_at = now + SAY_EVERY
                logger.warning("waiting for node 0 at %s port %d (%s)", place.master, place.port, problem)
            time.sleep(min(TRY_EVERY, until - now))


class RefusedError(Exception):
    """Node 0 refuses this connection."""

    def __init__(self, message: Refused) -> None:
        super().__init__(message.reason)
        self.again = message.again


def hello(place: Place, message: Join | Arrive, timeout: float) -> tuple[socket.socket, float]:
    """An accepted connection to node 0, and the seconds of silence after which it counts as lost."""
    sock = connect(place.master, place.port, place.address, timeout)
    try:
        sock.sendall(frame(message))
        answer = _answer(sock)
        if isinstance(answer, Refused):
            raise RefusedError(answer)
        if not isinstance(answer, Accepted):
            raise Unreadable("its answer is not that of an Outpace node 0")
        sock.settimeout(None)
        watch_over(sock, answer.link_timeout)
        return sock, answer.link_timeout
    except BaseException:
        sock.close()
        raise


def _answer(sock: socket.socket) -> ToNode:
    """Read the first message and no byte more: what follows may be for the rank that gets the socket."""
    frames = Frames[ToNode](ToNode, LONGEST_HELLO)
    while True:
        if not (data := sock.recv(frames.wanted)):
            raise ConnectionError("it closed the connection; is it node 0, with the same version of Outpace?")
        if answers := frames.feed(data):
            return answers[0]


class Session:
    """A node's work for one node 0."""

    def __init__(self, sock: socket.socket, link_timeout: float, place: Place, number: int) -> None:
        self._socket, self._sender, self._frames = sock, Sender(sock), Frames[ToNode](ToNode)
        self._limit, self._place, self._number = link_timeout, place, number
        self._heard = time.monotonic()
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._hear)
        self.served = False
        """Whether all ranks have loaded the model."""
        self._over = False

    def run(self) -> None:
        """Work until node 0 ends; raises Lost if it ended without saying so."""
        while not self._over:
            for key, _ in self._selector.select(TICK):
                if key.fileobj in self._selector.get_map():
                    key.data()
            if (silence := time.monotonic() - self._heard) > self._limit:
                raise Lost(
                    f"no message from node 0 at {self._place.master} for {silence:.0f} s: the machine or the "
                    "link to it is down; the ranks of this node were ended"
                )

    def leave(self, why: str) -> None:
        """Tell node 0 why this node leaves."""
        self._sender.send_small(frame(Leaving(why)))

    def close(self) -> None:
        self._socket.close()
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(GOODBYE if self._over else 0)
            rank.process.kill()
            rank.process.wait()
            while rank.written.forward() and not self._is_dry(rank):
                pass
            rank.written.file.close()
        self._selector.close()

    def _is_dry(self, rank: _Rank) -> bool:
        """Whether all output of an ended rank was read; a child of it may still hold the pipe open."""
        with selectors.DefaultSelector() as look:
            look.register(rank.written.file, selectors.EVENT_READ)
            return not look.select(0)

    def _hear(self) -> None:
        try:
            data = self._socket.recv(_AT_ONCE)
            messages = self._frames.feed(data)
        except (OSError, Unreadable) as error:
            raise Lost(f"the connection to node 0 at {self._place.master} broke ({error})") from None
        self._heard = time.monotonic()
        for message in messages:
            self._take(message)
        if not data and not self._over:
            raise Lost(f"node 0 at {self._place.master} closed the connection")

    def _take(self, message: ToNode) -> None:
        if isinstance(message, Ping):
            self._sender.send_small(_PONG)
        elif isinstance(message, StartRanks):
            for rank in message.ranks:
                self._start(rank, message)
        elif isinstance(message, Serving):
            self.served = True
            logger.info("node %d serves ranks %s", self._number, [rank.number for rank in self._ranks])
        elif isinstance(message, End):
            self._over = True
            if message.cause is not None:
                raise Lost(message.cause)

    def _start(self, number: int, asked: StartRanks) -> None:
        try:
            sock, _ = hello(self._place, Arrive(PROTOCOL, number, asked.key), ANSWER)
        except (OSError, Unreadable, RefusedError) as error:
            raise Lost(f"rank {number} cannot reach node 0 at {self._place.master} ({error})") from None
        with sock:
            os.set_inheritable(sock.fileno(), True)
            rank = _Rank(number, start(sock, self._place.environment))
        self._ranks.append(rank)
        self._selector.register(rank.written.file, selectors.EVENT_READ, partial(self._forward, rank))
        if (fd := watched(rank.process.pid)) is not None:
            self._selector.register(fd, selectors.EVENT_READ, partial(self._ended, rank, fd))
        logger.info("started rank %d of %d (process %d)", number, asked.size, rank.process.pid)

    def _forward(self, rank: _Rank) -> None:
        if not rank.written.forward():
            self._selector.unregister(rank.written.file)
            self._tell(rank)

    def _ended(self, rank: _Rank, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        rank.written.forward()
        self._tell(rank)

    def _tell(self, rank: _Rank) -> None:
        if rank.ended:
            return
        rank.ended = True
        how = end_of(rank.process, rank.written, 1.0)
        logger.error("rank %d %s", rank.number, how)
        self._sender.send_small(frame(Ended(rank.number, how)))


def gpus(config: LLMConfig) -> int | None:
    """Number of GPUs; None: GPUs are not used."""
    if config.device_type == "cpu":
        return None
    import torch  # this import takes seconds: only if there may be a GPU

    return torch.cuda.device_count()


def all_options(config: LLMConfig, *, exclude_unset: bool = False) -> dict[str, Any]:
    """All engine options, or only those that the user set, as JSON values."""
    found = config.model_dump(mode="json", exclude_unset=exclude_unset, exclude=_NOT_HERE, fallback=repr)
    if found.get("dtype") is not None:  # the same text if it was set as a torch.dtype
        found["dtype"] = str(config.dtype).removeprefix("torch.")
    return found


def run_agent(model: str | None, config: LLMConfig) -> int:
    """Run an agent until node 0 ends; returns the exit code. Raises EngineDead or ConfigError."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        Agent(model, config).run()
    except Stopped as stopped:
        return 0 if stopped.number == signal.SIGTERM else 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stderr.flush()
    return 0
