"""Fair shares among callers: one request never waits behind another caller's five hundred.

Tokens: each caller has a clock, the tokens it was served while others were there, divided by its weight. The waiting
sequence whose caller's clock is furthest behind is admitted next. The clock of a caller without waiting sequences is
moved forward to the slowest clock of those who wait. So nobody saves up credit, and nobody pays for tokens that others
did not want.

Slots and blocks: the rank of a sequence is the number of its caller's unfinished sequences before it, divided by the
weight. Steps serve ranks in order: the first sequence of every caller, then the second of every caller, and so on. A
waiting sequence may preempt running ones of a higher rank, so never a caller's first one. Ranks change only when a
sequence is added or ends, so two sequences cannot preempt each other in turn.

A single caller gets everything, in the plain order of `Order`.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from outpace.sequence import Sequence, Status, order_of

MAX_AWAY = 4096  # callers whose clocks are kept while they have no sequence


@dataclass(slots=True, eq=False)
class _Caller:
    name: str
    weight: float
    clock: float
    sequences: list[Sequence] = field(default_factory=list)  # unfinished ones, in order
    waiting: list[Sequence] = field(default_factory=list)  # the waiting ones among them
    changed: bool = True  # since ranks were last computed

    def rank(self) -> None:
        for number, sequence in enumerate(self.sequences):
            sequence.place = number / self.weight
        self.changed = False


class Shares:
    """Every unfinished sequence, by caller."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}
        self._away: dict[str, float] = {}  # clocks of callers without a sequence, if ahead of the others
        self._slowest = 0.0  # slowest clock of a waiting caller; never decreases

    @property
    def contended(self) -> bool:
        return len(self._callers) > 1

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        caller = self._callers.get(request.caller)
        if caller is None:
            clock = max(self._now(), self._away.pop(request.caller, 0.0))
            caller = self._callers[request.caller] = _Caller(request.caller, request.weight, clock)
        insort(caller.sequences, sequence, key=order_of)
        insort(caller.waiting, sequence, key=order_of)
        caller.weight, caller.changed = request.weight, True

    def move(self, sequence: Sequence) -> None:
        """Record that a sequence was admitted, or waits again."""
        waiting = self._callers[sequence.request.caller].waiting
        if sequence.status is Status.WAITING:
            insort(waiting, sequence, key=order_of)
        else:
            waiting.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        caller = self._callers[sequence.request.caller]
        caller.sequences.remove(sequence)
        if sequence.status is Status.WAITING:
            caller.waiting.remove(sequence)
        caller.changed = True
        if not caller.sequences:
            self._leave(caller)

    def turns(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences in order of service; the last ones are preempted first."""
        for caller in self._callers.values():
            if caller.changed:
                caller.rank()
        return sorted(running, key=lambda each: (each.order.priority, each.place, each.order))

    def firsts(self) -> list[Sequence]:
        """The first waiting sequence of each caller, in order of admission."""
        now = self._now()
        for caller in self._callers.values():
            if not caller.waiting and caller.clock < now:
                caller.clock = now
        found = [(caller.waiting[0], caller.clock) for caller in self._callers.values() if caller.waiting]
        found.sort(key=lambda entry: (entry[0].order.priority, entry[1], entry[0].order))
        return [sequence for sequence, _ in found]

    def charge(self, sequence: Sequence, end: int) -> None:
        """Charge the caller for tokens up to `end`; recomputed tokens are not charged again."""
        caller = self._callers[sequence.request.caller]
        caller.clock += max(0, end - sequence.num_charged) / caller.weight
        sequence.num_charged = max(end, sequence.num_charged)

    def _now(self) -> float:
        clocks = [each.clock for each in self._callers.values() if each.waiting]
        self._slowest = max(self._slowest, min(clocks, default=self._slowest))
        return self._slowest

    def _leave(self, caller: _Caller) -> None:
        now = self._now()
        del self._callers[caller.name]
        if caller.clock > now:
            self._away[caller.name] = caller.clock
        if len(self._away) > MAX_AWAY or not self._callers:
            kept = sorted(self._away.items(), key=lambda entry: -entry[1])[: MAX_AWAY // 2]
            self._away = {name: clock for name, clock in kept if clock > now} if self._callers else {}
