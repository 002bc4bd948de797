"""A stage of a pipeline: consecutive layers of a model, and the way from the stage before to the one after it.

Ranks of a world: the pipeline is outermost. A block of consecutive ranks has one stage, and divides its layers as a
world of its own would. The first block has the LAST stage: the first rank chooses tokens, and the logits are there.

    blocks of ranks   0        1        2        3
    stages            last     first    second   third
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.parallel.group import ALONE, Group
from outpace.parallel.trace import Trace, cpu_time, now


def stage_of(block: int, stages: int) -> int:
    """The stage that a block of ranks has."""
    return (block - 1) % stages


def block_of(stage: int, stages: int) -> int:
    """The block of ranks that has a stage."""
    return (stage + 1) % stages


@dataclass(eq=False)
class Link:
    """Hidden states from the stage before, and to the one after. Each stage makes the same calls in the same order."""

    peers: Group = ALONE
    """The ranks at this one's place in all stages, by blocks."""
    before: int = 0
    """The block of the stage before."""
    after: int = 0
    """The block of the stage after."""
    trace: Trace | None = None
    """When this stage computed, if somebody wants to know."""
    _on_their_way: deque[tuple["dist.Work", Tensor]] = field(default_factory=deque)
    _side: "torch.cuda.Stream | None" = None
    _count: int = 0
    _asked_at: float = 0.0
    _begun_at: float = 0.0
    _cpu_before: float = 0.0

    def begin(self, into: Tensor | None) -> None:
        """This stage computes next what the one before has sent; None: it is the first."""
        if self.trace is not None:
            self._asked_at = now()
        if into is not None:
            self.receive(into)
        if self.trace is not None:
            self._begun_at, self._cpu_before = now(), cpu_time()

    def end(self, x: Tensor | None) -> None:
        """This stage has computed what it sends to the one after; None: it is the last."""
        if self.trace is not None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            waited, used = self._begun_at - self._asked_at, cpu_time() - self._cpu_before
            self.trace.add(self._count, self._begun_at, now(), waited, used)
            self._count += 1
        if x is not None:
            self.send(x)

    def receive(self, into: Tensor) -> None:
        """What the stage before has sent next. On a GPU it is on its way while earlier work goes on."""
        if not into.numel():
            return
        if not into.is_cuda:
            dist.recv(into, group=self.peers.handle, group_src=self.before)
        elif self.peers.by_host:
            there = torch.empty(into.shape, dtype=into.dtype)
            dist.recv(there, group=self.peers.handle, group_src=self.before)
            into.copy_(there)
        else:
            self._receive_beside(into)

    def _receive_beside(self, into: Tensor) -> None:
        """By NCCL, on a stream of its own: it waits for nothing that this stage computes."""
        self._side = self._side or torch.cuda.Stream(into.device)
        with torch.cuda.stream(self._side):
            landed = torch.empty_like(into)
            work = dist.irecv(landed, group=self.peers.handle, group_src=self.before)
            assert work is not None, "this rank is in the group"
            work.wait()  # the stream does, the host does not
        current = torch.cuda.current_stream(into.device)
        current.wait_stream(self._side)
        landed.record_stream(current)
        into.copy_(landed)

    def send(self, x: Tensor) -> None:
        """Send this to the stage after, beside what comes next; x may be overwritten at once."""
        if not x.numel():
            return
        there = x.cpu() if x.is_cuda and self.peers.by_host else x.clone(memory_format=torch.contiguous_format)
        work = dist.isend(there, group=self.peers.handle, group_dst=self.after)
        assert work is not None, "this rank is in the group"
        self._on_their_way.append((work, there))
        while self._on_their_way and self._on_their_way[0][0].is_completed():
            self._on_their_way.popleft()

    def flush(self) -> None:
        """Wait until all that was sent is gone."""
        while self._on_their_way:
            self._on_their_way.popleft()[0].wait()


@dataclass(eq=False)
class Handed:
    """What goes in and out of the layers of a stage that the model's own code calls, while others use the link."""

    given: Tensor | None = None
    """For the first of them, instead of what the model gives it; None: that."""
    taken: Tensor | None = None
    """What the last of them gave."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What one rank has of a pipeline."""

    number: int = 0
    """The first one is 0."""
    count: int = 1
    peers: Group = ALONE
    """The ranks at this one's place in all stages; the first of them is in the last stage."""
    everyone: Group = ALONE
    """All ranks of all stages that run the same batches."""
    link: Link = field(default_factory=Link)
    _handed: list[Handed] = field(default_factory=list)

    @classmethod
    def of(cls, number: int, count: int, peers: Group, everyone: Group) -> "Stage":
        """A stage with its link to the others."""
        trace = Trace.asked(number, dist.get_rank())
        link = Link(peers, block_of(number - 1, count), block_of(number + 1, count), trace)
        return cls(number, count, peers, everyone, link)

    @property
    def is_first(self) -> bool:
        """Whether tokens come in here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out here."""
        return self.number == self.count - 1

    def from_last(self, x: Tensor) -> Tensor:
        """What the last stage has, in place."""
        return self.peers.from_first(x)

    @property
    def handed(self) -> Handed | None:
        """What a call of the model is handed; None: its layers use the link themselves."""
        return self._handed[-1] if self._handed else None

    @contextmanager
    def handing(self, given: Tensor | None = None) -> Iterator[Handed]:
        """Calls of the model inside do not use the link: this is for its first layer, and has what its last gives."""
        self._handed.append(Handed(given))
        try:
            yield self._handed[-1]
        finally:
            self._handed.pop()

    def __deepcopy__(self, memo: object) -> "Stage":
        return self


ONLY = Stage()
"""The whole model."""
