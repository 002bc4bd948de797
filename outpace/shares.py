"""Fair shares among callers: round robin over the sequences of each, so that one sequence never waits behind 500.

A sequence has a rank: its place among those of its caller that have not ended, divided by the caller's weight. Steps
serve ranks in order (the first sequence of every caller, then the second of every caller, ...), and a waiting sequence
may take the slot and the blocks of running ones of a higher rank. Callers whose waiting sequences have the same rank
take turns by the tokens they were served. A caller who is alone gets everything, in the plain order of `Order`.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from outpace.sequence import Sequence, Status, order_of


@dataclass(slots=True, eq=False)
class _Caller:
    name: str
    weight: float
    served: float  # tokens over weight; counted while others are there
    sequences: list[Sequence] = field(default_factory=list)  # those that have not ended, in order
    changed: bool = True  # since they were last ranked

    def first_waiting(self) -> Sequence | None:
        return next((each for each in self.sequences if each.status is Status.WAITING), None)


class Shares:
    """Knows every sequence that has not ended, by caller."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}

    @property
    def contended(self) -> bool:
        """Whether there is more than one caller."""
        return len(self._callers) > 1

    def add(self, sequence: Sequence) -> None:
        """A sequence has come. A caller who was away has neither debts nor savings."""
        request = sequence.request
        caller = self._callers.get(request.caller)
        if caller is None:
            served = min((other.served for other in self._callers.values()), default=0.0)
            caller = self._callers[request.caller] = _Caller(request.caller, request.weight, served)
        insort(caller.sequences, sequence, key=order_of)
        caller.weight, caller.changed = request.weight, True

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        caller = self._callers[sequence.request.caller]
        caller.sequences.remove(sequence)
        caller.changed = True
        if not caller.sequences:
            del self._callers[caller.name]

    def turns(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences in the order in which a step serves them; the last give way first."""
        for caller in self._callers.values():
            if caller.changed:
                for place, sequence in enumerate(caller.sequences, start=1):
                    sequence.place = place / caller.weight
                caller.changed = False
        return sorted(running, key=lambda each: (each.order.priority, each.place, each.order))

    def first(self, waiting: list[Sequence]) -> Sequence:
        """The waiting sequence that comes in next."""
        if not self.contended:
            return waiting[0]
        firsts = ((caller.first_waiting(), caller.served) for caller in self._callers.values())
        found = [(each.rank, served, each.order, each) for each, served in firsts if each is not None]
        return min(found, key=lambda entry: entry[:3])[3]

    def hungry(self, running: Iterable[Sequence]) -> int:
        """How many callers have prompts to compute."""
        names = {each.request.caller for each in running if each.is_prefilling}
        names.update(name for name, caller in self._callers.items() if caller.first_waiting() is not None)
        return len(names)

    def charge(self, sequences: Iterable[tuple[Sequence, int]]) -> None:
        """Count the tokens that a step computes for each of these sequences."""
        for sequence, num_tokens in sequences:
            caller = self._callers[sequence.request.caller]
            caller.served += num_tokens / caller.weight
