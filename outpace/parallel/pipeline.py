"""A pipeline stage: consecutive layers of a model, and the link to the previous and the next stage.

The pipeline is the outermost dimension of the ranks. A block of consecutive ranks has one stage and shards its layers
like a world of its own. The first block has the LAST stage, because the first rank samples and needs the logits.

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
    return (block - 1) % stages


def block_of(stage: int, stages: int) -> int:
    return (stage + 1) % stages


@dataclass(eq=False)
class Link:
    """Receives hidden states from the previous stage and sends them on. All stages make the same calls in order."""

    peers: Group = ALONE
    """The ranks at this rank's position in all stages, by blocks."""
    before: int = 0
    """The block of the previous stage."""
    after: int = 0
    """The block of the next stage."""
    trace: Trace | None = None
    """Records when this stage computed; None: not recorded."""
    _on_their_way: deque[tuple["dist.Work", Tensor]] = field(default_factory=deque)
    _side: "torch.cuda.Stream | None" = None
    _count: int = 0
    _asked_at: float = 0.0
    _begun_at: float = 0.0
    _cpu_before: float = 0.0

    def begin(self, into: Tensor | None) -> None:
        """Begin a micro-batch: receive its input from the previous stage; None for the first stage."""
        if self.trace is not None:
            self._asked_at = now()
        if into is not None:
            self.receive(into)
        if self.trace is not None:
            self._begun_at, self._cpu_before = now(), cpu_time()

    def end(self, x: Tensor | None) -> None:
        """End a micro-batch: send its output to the next stage; None for the last stage."""
        if self.trace is not None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            waited, used = self._begun_at - self._asked_at, cpu_time() - self._cpu_before
            self.trace.add(self._count, self._begun_at, now(), waited, used)
            self._count += 1
        if x is not None:
            self.send(x)

    def receive(self, into: Tensor) -> None:
        """Receive from the previous stage. On a GPU this overlaps with earlier work."""
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
        """Receive by NCCL on a separate stream, so that it does not wait for this stage's kernels."""
        self._side = self._side or torch.cuda.Stream(into.device)
        with torch.cuda.stream(self._side):
            landed = torch.empty_like(into)
            work = dist.irecv(landed, group=self.peers.handle, group_src=self.before)
            assert work is not None, "this rank is in the group"
            work.wait()  # the stream waits, not the host
        current = torch.cuda.current_stream(into.device)
        current.wait_stream(self._side)
        landed.record_stream(current)
        into.copy_(landed)

    def send(self, x: Tensor) -> None:
        """Send x to the next stage without blocking; x may be overwritten at once."""
        if not x.numel():
            return
        there = x.cpu() if x.is_cuda and self.peers.by_host else x.clone(memory_format=torch.contiguous_format)
        work = dist.isend(there, group=self.peers.handle, group_dst=self.after)
        assert work is not None, "this rank is in the group"
        self._on_their_way.append((work, there))
        while self._on_their_way and self._on_their_way[0][0].is_completed():
            self._on_their_way.popleft()

    def flush(self) -> None:
        while self._on_their_way:
            self._on_their_way.popleft()[0].wait()


@dataclass(eq=False)
class Handed:
    """Input and output of a stage's layers when the model's own forward calls them and other code uses the link."""

    given: Tensor | None = None
    """Input of the first layer; None: what the model passes to it."""
    taken: Tensor | None = None
    """Output of the last layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The pipeline as one rank sees it."""

    number: int = 0
    """Number of this stage, from 0."""
    count: int = 1
    peers: Group = ALONE
    """The ranks at this rank's position in all stages; the first of them is in the last stage."""
    everyone: Group = ALONE
    """All ranks of all stages that run the same batches."""
    link: Link = field(default_factory=Link)
    _handed: list[Handed] = field(default_factory=list)

    @classmethod
    def of(cls, number: int, count: int, peers: Group, everyone: Group) -> "Stage":
        trace = Trace.asked(number, dist.get_rank())
        link = Link(peers, block_of(number - 1, count), block_of(number + 1, count), trace)
        return cls(number, count, peers, everyone, link)

    @property
    def is_first(self) -> bool:
        """Whether this stage takes token ids."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage produces logits."""
        return self.number == self.count - 1

    def from_last(self, x: Tensor) -> Tensor:
        return self.peers.from_first(x)

    @property
    def handed(self) -> Handed | None:
        """Input and output for the current call; None: the layers use the link themselves."""
        return self._handed[-1] if self._handed else None

    @contextmanager
    def handing(self, given: Tensor | None = None) -> Iterator[Handed]:
        """Inside, calls of the model do not use the link but `handed`'s input and output."""
        self._handed.append(Handed(given))
        try:
            yield self._handed[-1]
        finally:
            self._handed.pop()

    def __deepcopy__(self, memo: object) -> "Stage":
        return self


ONLY = Stage()
"""The only stage: the whole model."""
