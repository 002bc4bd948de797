"""The first rank's side: starts the other ranks, sends them every step, and ends with them."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedTokenizerBase

from outpace.config import LLMConfig
from outpace.config.rules import num_ranks
from outpace.errors import ConfigError, EngineDead, ModelError, NotSupported, OutpaceError, StateError
from outpace.load_paged import PagedParts, find_divisible, load_paged
from outpace.log import chosen, logger
from outpace.offload.streaming import Streaming
from outpace.process_wide import environment
from outpace.ranks import agree, world
from outpace.ranks.gather import Tell, gather, open_doors, start_ranks
from outpace.ranks.messages import Begin, Reset, Sender, ToFollower, frame
from outpace.ranks.network import Place, connections, listen, own_sockets, place_of, watch_over_new
from outpace.ranks.process import start, versions
from outpace.ranks.steps import launch_of
from outpace.ranks.watch import Follower, Watch
from outpace.runner.threads import share
from outpace.types import Step

GOODBYE = 5.0  # seconds for the other ranks to end when told to
TRY = timedelta(seconds=2)  # seconds to reach a store before checking whether its rank still lives
CAUSE = 5.0  # seconds that a failure here waits for the report of another rank that caused it
_OBJECTS = ("tensor_parallel.mpu", "tensor_parallel.tp_group", "moe.ep_group", "moe.ep_mp_group")
_REMEDY = "start the script with torchrun and use init_inference"
_KINDS: tuple[type[OutpaceError], ...] = (ConfigError, ModelError, NotSupported)


class Ranks:
    """All ranks of one engine, seen from the first. Not thread-safe, except `close`."""

    def __init__(self, config: LLMConfig) -> None:
        self.size = num_ranks(config)
        """Number of ranks, this one included."""
        self.local = self.size // config.nodes.nnodes
        """Number of ranks on each machine."""
        self._place = place_of(config.nodes) if config.nodes.nnodes > 1 else None
        """This machine's place in the network; None: there is one machine."""
        self.config = config
        """The config of this rank: from `start` on with its own device."""
        self.on_lost: Callable[[str], None] = lambda cause: None
        """Called in another thread when the other ranks have ended without being told to."""
        self._watch: Watch | None = None
        self._followers: list[Follower] = []
        self._given_up: str | None = None
        self._closed = False
        self._in_world = False
        """Whether this process has joined a world for these ranks; it may be in another LLM's."""
        self._before: frozenset[str] = frozenset()
        self._made: frozenset[str] | None = None
        """Sockets that the world has opened in this process; None: it is still opening them."""
        self._pid = os.getpid()

    @property
    def nodes(self) -> list[str]:
        """A description of the machines and their ranks, if there are several."""
        if self._place is None or self._watch is None:
            return []
        there = {node.number: node for node in self._watch.nodes}
        first = f"node 0 ({self._place.address}): ranks {list(range(self.local))}"
        return [first, *(f"{there[number].name}: ranks {list(there[number].ranks)}" for number in sorted(there))]

    def start(self, model: str | None, tell: Tell = lambda part: None) -> None:
        """Start the other ranks and join them. tell: called with progress messages."""
        kind = self.config.device_type
        world.check_world(self.size, self.config.device, kind, self.local)
        self._in_world = True
        self._before = frozenset(own_sockets().values())
        sent = as_data(self.config)
        begin = partial(self._begin, model, sent, kind)
        store = self._start_here(begin) if self._place is None else self._start_nodes(self._place, begin, tell)
        self.config = LLMConfig(**{**self.config.given(), "device": world.device_of(0, kind, self.local)})
        world.join(store, 0, self.size, self.config.device or kind, self.local)
        pids = [each.process.pid for each in self._followers if each.process is not None]
        chosen("started ranks", self.size - 1, f"processes {pids}" + "".join(f"; {node}" for node in self.nodes))

    def _start_here(self, begin: Callable[..., None]) -> TCPStore:
        """All ranks on this machine."""
        with listen(world.HOST, 0) as store:
            port = store.getsockname()[1]
            for rank in range(1, self.size):
                self._followers.append(_start(rank, self._environment, store if rank == 1 else None))
            self._watch = Watch(self._followers, lambda cause: self.on_lost(cause), cut=self._cut)
            for each in self._followers:
                begin(each, port, store.fileno() if each.rank == 1 else None, world.HOST)
        self._await_here()
        return self._meet(port)

    def _start_nodes(self, place: Place, begin: Callable[..., None], tell: Tell) -> TCPStore:
        """Ranks on several machines; this one hosts the store."""
        door, listening = open_doors(self.config, self.size, place)
        self._followers += [_start(rank, self._environment, None) for rank in range(1, self.local)]
        self._watch = Watch(self._followers, lambda cause: self.on_lost(cause), door, self._cut)
        with listening:
            seconds = self.config.nodes.join_timeout
            gather(self._watch, door, place, seconds, tell)
            port = listening.getsockname()[1]
            store = world.meet(self.size, port, listening.detach(), host=place.address)
        start_ranks(self._watch, door, self._followers, seconds, tell)
        for each in self._followers:
            begin(each, port, None, place.address if each.node is None else None)
        self._await_here()
        world.all_here(store)
        return store

    def _begin(
        self,
        model: str | None,
        config: dict[str, Any],
        kind: str,
        follower: Follower,
        port: int,
        listening: int | None,
        host: str | None,
    ) -> None:
        """Tell a rank what to load."""
        node, nodes = follower.node, self.config.nodes
        source = model if node is None or node.model is None else node.model
        given = {**config, "device": world.device_of(follower.rank, kind, self.local)}
        threads = share(torch.get_num_threads(), self.local) if node is None else 0
        about = threads, logger.getEffectiveLevel(), host, self.local, nodes.link_timeout if node is not None else 0.0
        message = Begin(follower.rank, self.size, port, listening, source, given, *about)
        with contextlib.suppress(OSError):  # it is gone: whoever waits for it will notice
            follower.sender.send(frame(message))

    @property
    def _environment(self) -> dict[str, str]:
        """Environment variables for the interface of gloo and NCCL."""
        if self.size == 1:
            return {}
        return world.local_environment() if self._place is None else self._place.environment

    def _await_here(self) -> None:
        """Wait until all others have found the store, and check that they have the same versions."""
        self._await(lambda each: each.here is not None)
        for each in self._followers:
            assert each.here is not None, "awaited"
            agree.check_same(versions(), each.here.versions, each.rank)

    def _cut(self) -> None:
        """Abort collectives of this process that wait for ended ranks.

        On one machine gloo's end by themselves. An unreachable machine does not close its connections, so this process
        closes them.
        """
        world.free()
        if self._place is None or self._watch is None:
            return
        made = frozenset(own_sockets().values()) - self._before if self._made is None else self._made
        for sock in connections(made - self._watch.sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def agree(self, parts: PagedParts, model: str | None) -> None:
        """Wait until all have loaded the model, and check that it is the same."""
        if self.size == 1:
            return
        own = agree.facts(parts, model)
        self._await(lambda each: each.loaded is not None)
        for each in self._followers:
            assert each.loaded is not None, "awaited"
            agree.check_same(own, each.loaded.facts, each.rank)
        used = parts.model.ranks.size * parts.model.stage.count
        if used != self.size:
            raise NotSupported(f"{_asked_by(self.config)}: {self.size} ranks, of which {parts.name} can use {used}")
        if self._place is not None and self._watch is not None:
            watch_over_new(self._before, self.config.nodes.link_timeout)
            self._made = frozenset(own_sockets().values()) - self._before
            self._watch.serving()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """For work inside that belongs to the start: if it fails, all ranks are ended."""
        try:
            with environment(self._environment):  # gloo reads its interface from the environment when groups are made
                yield
        except BaseException as error:
            cause = self.cause_of(error)
            self.close(f"node 0 could not start: {cause or error or type(error).__name__}")
            if cause is not None:
                raise cause from error
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """For work inside that all ranks do together: if it fails on one, all are ended.

        A first Ctrl-C is held back until the end; a second one interrupts.
        """
        if self.size == 1:
            yield
            return
        self.check()
        interrupted = Interrupt()
        try:
            with interrupted:
                yield
        except BaseException as error:
            cause = self.cause_of(error)
            if cause is None:
                self._give_up(f"rank 0 of {self.size} failed: {type(error).__name__}: {error}")
                cause = EngineDead(str(self._given_up)) if isinstance(error, Exception) else None
            if cause is not None:
                raise cause from error
            raise
        if interrupted.came:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise if the other ranks have ended, or belong to another process (after a fork)."""
        if self.size > 1 and self._is_fork():
            raise StateError(
                f"the ranks of this LLM belong to process {self._pid}, of which this one is a fork; make a new LLM here"
            )
        if self.size > 1 and (cause := self._given_up or (self._watch and self._watch.cause)):
            raise EngineDead(f"{cause}; make a new LLM")
        if self.size > 1 and self._closed:
            raise StateError("the ranks of this LLM are shut down; make a new one")

    def launch(self, step: Step, *, for_logits: bool = False) -> None:
        """Send a step to the others; the caller runs it on this rank next."""
        if self.size > 1:
            self._tell(launch_of(step, for_logits=for_logits))

    def reset(self) -> None:
        if self.size > 1:
            self._tell(Reset())

    def say_end(self) -> None:
        """Tell other machines that this process ends regularly; ranks on this machine notice by themselves."""
        if self._watch is not None and not self._is_fork():
            self._watch.closing = True
            self._watch.dismiss(None)

    def close(self, cause: str | None = None) -> None:
        """End the others and wait for them. May be called repeatedly and from any thread. cause: what failed."""
        if self.size == 1 or self._closed or self._is_fork():
            return
        self._closed = True
        if self._watch is not None:
            self._watch.closing = True
            self._watch.dismiss(cause)
            for each in self._followers:
                with contextlib.suppress(OSError):
                    each.socket.shutdown(socket.SHUT_WR)
            if threading.current_thread() is not self._watch.thread:
                self._watch.thread.join(GOODBYE)
                self._kill()
                self._watch.thread.join(GOODBYE)
        self._kill()
        if self._in_world:
            world.leave()

    def _tell(self, message: ToFollower) -> None:
        if self._is_fork():
            return
        data = frame(message)
        for each in self._followers:
            with contextlib.suppress(OSError):  # it is gone: the watching thread will notice
                each.sender.send(data)

    def _is_fork(self) -> bool:
        """Whether this process is a fork of the one that started the ranks, and must not touch them."""
        return os.getpid() != self._pid

    def _await(self, ready: Callable[[Follower], bool]) -> None:
        assert self._watch is not None, "started"
        if not self._watch.wait(lambda: all(map(ready, self._followers))):
            raise EngineDead(str(self._watch.cause))

    def _meet(self, port: int) -> TCPStore:
        """Connect to the store; fails if its rank has ended."""
        while True:
            try:
                return world.meet(self.size, port, patience=TRY)
            except dist.DistError:
                self.check()

    def cause_of(self, error: BaseException) -> OutpaceError | None:
        """The failure of another rank that explains an error here; None: there is none."""
        watch = self._watch
        if watch is None or not isinstance(error, Exception):
            return None
        if not watch.wait(lambda: watch.cause is not None, CAUSE if world.of_others(error) else 0):
            return None
        kinds = {kind.__name__: kind for kind in _KINDS}
        if watch.failed is not None and watch.failed.kind in kinds:
            return kinds[watch.failed.kind](watch.failed.message)
        return EngineDead(f"{watch.cause}; make a new LLM")

    def _give_up(self, cause: str) -> None:
        """End all: this rank is out of step with the others, so later results would be wrong."""
        self._given_up = f"{cause}; the other ranks were ended"
        if self._watch is not None:
            self._watch.closing = True
            self._watch.dismiss(self._given_up)
        self._kill()

    def _kill(self) -> None:
        if self._watch is not None:
            self._watch.kill()


def load_ranked(
    model: str | os.PathLike[str] | nn.Module | None,
    config: LLMConfig,
    *,
    tokenizer: bool | PreTrainedTokenizerBase = True,
    tell: Tell = lambda part: None,
) -> tuple[PagedParts, Ranks]:
    """`load_paged` on all ranks that the config asks for; returns this rank's model and the `Ranks`.

    tell: called with progress messages.
    """
    if config.nodes.node_rank > 0:
        raise ConfigError(
            f"nodes.node_rank: an LLM can only be made on node 0; on node {config.nodes.node_rank} run `outpace serve` "
            "with --nnodes, --node-rank and --master-addr"
        )
    ranks = Ranks(config)
    if ranks.size == 1:
        return load_paged(model, config, tokenizer=tokenizer), ranks
    if isinstance(model, nn.Module):
        raise NotSupported(
            f"{_asked_by(config)}: a live module cannot be sent to the {ranks.size} ranks that LLM starts; save it "
            f"with save_pretrained and give the folder, or {_REMEDY}"
        )
    source = None if model is None else os.fspath(model)
    with ranks.starting():
        agree.model_path(source)  # fetch it once, before several ranks look for it
        found = find_divisible(source, config, tokenizer)
        ranks.start(source, tell)
        tell("loading the weights")
        parts = load_paged(found, ranks.config, tokenizer=tokenizer)
        ranks.agree(parts, source)
    return parts, ranks


def _asked_by(config: LLMConfig) -> str:
    return "tensor_parallel_size" if config.pipeline_parallel.pp_size == 1 else "pipeline_parallel_size"


def let_go(ranks: Ranks, streaming: Streaming | None) -> None:
    """End the other ranks and the streaming of layers."""
    ranks.close()
    if streaming is not None:
        streaming.close()


@contextlib.contextmanager
def starting(ranks: Ranks, streaming: Streaming | None) -> Iterator[None]:
    """`Ranks.starting`, which also ends the streaming of layers after a failure."""
    try:
        with ranks.starting():
            yield
    except BaseException:
        if streaming is not None:
            streaming.close()
        raise


def as_data(config: LLMConfig) -> dict[str, Any]:
    """The options set by the user as plain data; raises for values that are not."""
    for path in _OBJECTS:
        section, _, name = path.partition(".")
        if getattr(getattr(config, section), name) is not None:
            raise ConfigError(f"{path}: cannot be sent to the ranks that LLM starts; do not set it, or {_REMEDY}")
    given = config.model_dump(exclude_unset=True, exclude={"device", "nodes"})
    for name, value in given.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"{name}: contains values that cannot be sent to the ranks that LLM starts; do not set it, or {_REMEDY}"
            ) from None
    return given


def _start(rank: int, environment: Mapping[str, str], store: socket.socket | None) -> Follower:
    """Start a rank on this machine. store: the store's socket, if this rank hosts it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = start(theirs, environment, [] if store is None else [store.fileno()])
    return Follower(rank, process, ours, Sender(ours))


class Interrupt:
    """Holds back the first Ctrl-C in the main thread, which between two collectives would deadlock the others."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *error: object) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
