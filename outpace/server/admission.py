"""Admission: how much may wait for the engine, in all and of each caller, and how much waits and runs now."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from outpace.errors import Overloaded
from outpace.server.engine import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Limits of what may wait; a request beyond them is refused at once. One with n answers counts n times.

    At a limit of all callers together, only those above their fair part of it are refused: the limit divided by the
    number of callers that have anything in flight. So a caller that fills the queue does not shut others out. One that
    has nothing waiting is always admitted. With k callers that come one after the other, at most 1 + 1/2 + ... + 1/k
    times the limit waits (twice the limit for 4 callers), and one request more of each.
    """

    max_waiting: int = 256
    """Sequences without a first token, beyond those that the engine has room to run at once."""
    max_waiting_tokens: int = 1 << 20
    """Tokens of prompts without a first token; a longer prompt is admitted when its caller has nothing else waiting."""
    max_sequences_per_caller: int | None = None
    """Sequences of one caller, waiting and running."""
    max_waiting_tokens_per_caller: int | None = None
    """As `max_waiting_tokens`, of one caller."""


@dataclass(slots=True)
class Load:
    """How much waits and runs."""

    waiting: int = 0  # sequences
    waiting_tokens: int = 0
    running: int = 0  # sequences


@dataclass(slots=True, frozen=True)
class Size:
    """What a request adds: its caller, sequences and prompt tokens."""

    caller: str
    sequences: int
    tokens: int

    @classmethod
    def of(cls, requests: Sequence[EngineRequest]) -> "Size":
        """The size of several requests of one caller together."""
        tokens = sum(len(each.prompt_token_ids) for each in requests)
        return cls(requests[0].caller.name, sum(each.params.n for each in requests), tokens)


class Loads:
    """Counts what waits and runs, by caller, and refuses what exceeds the limits."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission or Admission()
        self._all = Load()
        self._of: dict[str, Load] = {}  # by caller, while it has any
        self._reserved: dict[str, Size] = {}  # by the id of the request

    def admit(self, size: Size, max_num_seqs: int) -> None:
        """Refuse a request when the queue is full, or when one caller has too many."""
        most, load, own = self._admission, self._all, self._of.get(size.caller, Load())
        count, num_tokens = size.sequences, size.tokens
        callers = len(self._of) + (size.caller not in self._of)
        room = most.max_waiting + max(0, max_num_seqs - load.running)
        if own.waiting and load.waiting + count > room and own.waiting + count > room // callers:
            raise Overloaded(
                f"{load.waiting} requests are waiting (max_waiting={most.max_waiting}), no room for {count}; try later"
            )
        room = most.max_waiting_tokens
        waiting = load.waiting_tokens + num_tokens
        if own.waiting and waiting > room and own.waiting_tokens + num_tokens > room // callers:
            raise Overloaded(
                f"{load.waiting_tokens} prompt tokens are waiting (max_waiting_tokens={most.max_waiting_tokens}), "
                f"no room for {num_tokens}; try later"
            )
        sequences, tokens = most.max_sequences_per_caller, most.max_waiting_tokens_per_caller
        if sequences is not None and own.waiting + own.running + count > sequences:
            raise Overloaded(
                f"{own.waiting + own.running} sequences of one caller are in the server "
                f"(max_sequences_per_key={sequences}), no room for {count}; try later"
            )
        if tokens is not None and own.waiting and own.waiting_tokens + num_tokens > tokens:
            raise Overloaded(
                f"{own.waiting_tokens} prompt tokens of one caller are waiting (max_waiting_tokens_per_key={tokens}), "
                f"no room for {num_tokens}; try later"
            )

    @contextmanager
    def reserved(self, requests: Sequence[EngineRequest]) -> Iterator[None]:
        """Count requests that were admitted together, until each is submitted or the context ends."""
        for request in requests:
            self._reserved[request.request_id] = size = Size.of([request])
            self.enter(size)
        try:
            yield
        finally:
            for request in requests:
                self.claim(request)

    def claim(self, request: EngineRequest) -> bool:
        """Give back what was reserved for a request; False if nothing was."""
        size = self._reserved.pop(request.request_id, None)
        if size is not None:
            self.begin(size)
            self.leave(size)
        return size is not None

    def enter(self, size: Size) -> None:
        """Count a request as waiting."""
        for load in (self._all, self._of.setdefault(size.caller, Load())):
            load.waiting += size.sequences
            load.waiting_tokens += size.tokens

    def begin(self, size: Size) -> None:
        """Count a waiting request as running."""
        for load in (self._all, self._of[size.caller]):
            load.waiting -= size.sequences
            load.waiting_tokens -= size.tokens
            load.running += size.sequences

    def leave(self, size: Size) -> None:
        """Stop counting a running request."""
        for load in (self._all, self._of[size.caller]):
            load.running -= size.sequences
        if self._of[size.caller] == Load():
            del self._of[size.caller]
