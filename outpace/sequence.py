"""A request on its way through the scheduler: its tokens, its blocks, its place in the queue. No tensors."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from outpace.types import Request

PROGRESS = 16  # tokens between two times that a sequence gives way to other callers


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()  # new, or preempted: by recompute (nothing computed) or by swap (its blocks are host blocks)
    FETCHING = auto()  # what files have of its prompt is being read to host memory; then it waits again
    LOADING = auto()  # it has its blocks, and what host memory has of them is on its way
    RUNNING = auto()
    ENDED = auto()  # and kept only for the steps in flight


class Order(NamedTuple):
    """The order of sequences; smaller is first."""

    priority: int
    arrival: int
    """Of its request: the n answers to a prompt keep one place."""
    added: int
    """Tells the answers of one request apart."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and how far it has come."""

    request: Request
    order: Order
    limit: int  # most tokens it can have
    stops: frozenset[int]
    salt: str
    tokens: list[int]  # known ones: the prompt and the answer so far
    prompt_only: bool = False
    status: Status = Status.WAITING
    num_pending: int = 0  # tokens that steps in flight sample
    num_computed: int = 0  # tokens in the cache once the steps in flight are done
    num_registered: int = 0  # full blocks that the pool has been told of
    num_cached: int | None = None  # tokens that were in the cache when it first ran
    in_flight: int = 0  # steps, and copies to its blocks
    afresh: bool = False  # the runner does not know it yet, or any more
    swapping: int | None = None  # the copy to its host blocks
    num_fetched_after: int | None = None  # blocks that device and host memory had when it began to read files
    place: float = 0.0  # sequences of its caller before it, over the caller's weight; see `outpace.shares`
    num_charged: int = 0  # tokens that its caller has been charged for
    gave_way_at: int | None = None  # tokens it had when it last gave way to another caller
    passed: int = 0  # blocks of others that came in before it, though it was first
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)  # of a preempted one: what its blocks held
    fetched_blocks: list[int] = field(default_factory=list)  # of host memory: what was read for it from files, and more
    hashes: list[bytes] = field(default_factory=list)

    @property
    def target(self) -> int:
        """Tokens to compute so far; the last one it can have is never read again."""
        return min(len(self.tokens) + self.num_pending, self.limit - 1)

    @property
    def may_give_way(self) -> bool:
        """Whether it has made progress since it last gave way to another caller."""
        return self.gave_way_at is None or len(self.tokens) >= self.gave_way_at + PROGRESS

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is served first, where several callers share the steps."""
        return self.order.priority, self.place

    @property
    def is_prefilling(self) -> bool:
        """Whether it misses more than the one token of a decode."""
        return self.target - self.num_computed > 1


def order_of(sequence: Sequence) -> Order:
    """For sorting."""
    return sequence.order
