"""The scheduler's state of one request: its tokens, blocks and place in the queue. No tensors."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from outpace.types import Request

PROGRESS = 16  # new tokens a sequence makes before it can be preempted for another caller again
WINDOW = 4096  # arrivals among which the longest go first; no request is overtaken by more than this


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()  # new, or preempted: by recompute (nothing computed) or by swap (blocks in host memory)
    FETCHING = auto()  # its prefix is being read from files to host memory; then it is WAITING again
    LOADING = auto()  # it has its blocks, and copies from host memory fill them
    RUNNING = auto()
    ENDED = auto()  # kept only until its steps in flight are updated


class Order(NamedTuple):
    """The order of sequences; smaller is first."""

    priority: int
    window: int
    """With `longest_first`: arrival // WINDOW, so that no request starves; otherwise 0."""
    shortness: int
    """With `longest_first`: minus the new tokens a request may have; otherwise 0."""
    arrival: int
    """The same for all n answers to one prompt, so that they keep one place."""
    added: int
    """Tells the n answers apart."""

    @classmethod
    def by_arrival(cls, request: Request, arrival: int, added: int) -> "Order":
        """First come, first served."""
        return cls(request.priority, 0, 0, arrival, added)

    @classmethod
    def longest_first(cls, request: Request, arrival: int, added: int) -> "Order":
        """The most new tokens first; it does not change while the request runs."""
        return cls(request.priority, arrival // WINDOW, -request.max_tokens, arrival, added)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its progress."""

    request: Request
    order: Order
    limit: int  # most tokens it can have
    stops: frozenset[int]
    salt: str
    tokens: list[int]  # prompt and answer so far, without tokens in flight
    prompt_only: bool = False
    status: Status = Status.WAITING
    num_pending: int = 0  # tokens that steps in flight sample
    num_computed: int = 0  # tokens in the cache once the steps in flight are done
    num_registered: int = 0  # full blocks registered in the prefix cache
    num_cached: int | None = None  # tokens that were in the cache when it first ran
    in_flight: int = 0  # steps, and copies to its blocks
    afresh: bool = False  # the runner must be sent the whole request: it is new, or was preempted
    swapping: int | None = None  # id of the copy to its host blocks
    num_fetched_after: int | None = None  # blocks found on device and in host memory when it began to read files
    place: float = 0.0  # number of its caller's sequences before it, over the caller's weight; see `outpace.shares`
    num_charged: int = 0  # tokens charged to its caller
    gave_way_at: int | None = None  # tokens it had when it was last preempted for another caller
    passed: int = 0  # blocks given to others that overtook it while it was first
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)  # of a preempted sequence: the contents of its blocks
    fetched_blocks: list[int] = field(default_factory=list)  # in host memory, held for it after reading from files
    hashes: list[bytes] = field(default_factory=list)

    @property
    def target(self) -> int:
        """Tokens to compute so far. The last token of the limit is never an input, so it is not computed."""
        return min(len(self.tokens) + self.num_pending, self.limit - 1)

    @property
    def num_missing(self) -> int:
        """Most tokens that are still to be sampled by steps not yet scheduled."""
        return self.limit - len(self.tokens) - self.num_pending

    @property
    def may_give_way(self) -> bool:
        """Whether it has made progress since it was last preempted for another caller."""
        return self.gave_way_at is None or len(self.tokens) >= self.gave_way_at + PROGRESS

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is served first when several callers share the steps."""
        return self.order.priority, self.place

    @property
    def is_prefilling(self) -> bool:
        """Whether it lacks more than the one token of a decode."""
        return self.target - self.num_computed > 1


def order_of(sequence: Sequence) -> Order:
    return sequence.order
