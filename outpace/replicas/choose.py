"""Chooses the replica of a request: the one with the least to do, or one that has had the same beginning of a prompt.

Pure bookkeeping: it knows numbers and hashes, no sockets and no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

LEVELS = (64, 256, 1024, 4096, 16384)
"""Lengths, in bytes, of the beginnings whose hashes are remembered. A shorter one is not worth waiting for."""
MOST_PREFIXES = 16384
"""Hashes that are remembered; the least recently used are forgotten."""
ROOM = 256.0
"""A replica that has had the beginning may have this much more load than the least loaded one, in tokens."""
SAVED = 1 / 8
"""Added for each byte of that beginning: tokens that need not be computed."""
_PROMPT = 1 / 16  # a byte of a prompt: a token of four bytes takes a quarter of the time of one that is generated
_ANSWER, _LONGEST_ANSWER = 256, 1024  # tokens of an answer: without max_tokens, and at most
_LEAST = 16.0  # cost of any request


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is known of a request before it is forwarded."""

    cost: float = _LEAST
    """How much there is to do, in generated tokens."""
    prefixes: tuple[bytes, ...] = ()
    """Hashes of the beginnings of its prompt that are as long as `LEVELS`, shortest first."""


def cost_of(num_bytes: int, max_tokens: int | None, answers: int = 1) -> float:
    """The cost of a request, in generated tokens. max_tokens: None if it is not given; 0: no answer."""
    tokens = _ANSWER if max_tokens is None else max(0, min(max_tokens, _LONGEST_ANSWER))
    return _LEAST + num_bytes * _PROMPT + tokens * max(1, min(answers, 128))


class Chooser:
    """Knows the load of each replica, and which beginnings of prompts it has had."""

    def __init__(self, count: int, most_prefixes: int = MOST_PREFIXES) -> None:
        self.loads = [0.0] * count
        """Load of each, in generated tokens."""
        self.running = [0] * count
        """Running requests of each."""
        self.totals = [0] * count
        """Requests that each was given so far."""
        self._most = most_prefixes
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # prefix -> replicas, one bit for each

    def choose(self, ready: Collection[int], prefixes: Sequence[bytes] = ()) -> int | None:
        """One of the replicas that are ready; None: there is none.

        The longest known beginning decides, unless all replicas that have had it are much more loaded than the least
        loaded one.
        """
        if not ready:
            return None
        least = min(ready, key=self._order)
        for level, prefix in reversed(list(zip(LEVELS, prefixes, strict=False))):
            bits = self._holders.get(prefix, 0)
            if holders := [each for each in ready if bits >> each & 1]:
                best = min(holders, key=self._order)
                if self.loads[best] <= self.loads[least] + ROOM + SAVED * level:
                    return best
        return least

    def begin(self, replica: int, wanted: Wanted) -> None:
        """Count a request that is sent to a replica."""
        self.loads[replica] += wanted.cost
        self.running[replica] += 1
        self.totals[replica] += 1
        for prefix in wanted.prefixes:
            self._holders[prefix] = self._holders.get(prefix, 0) | 1 << replica
            self._holders.move_to_end(prefix)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def end(self, replica: int, wanted: Wanted) -> None:
        """Stop counting a request that has ended, in whatever way."""
        self.running[replica] -= 1
        self.loads[replica] = self.loads[replica] - wanted.cost if self.running[replica] else 0.0  # no rounding stays

    def forget(self, replica: int) -> None:
        """A replica has a new process, which has had no prompt yet."""
        for prefix, bits in list(self._holders.items()):
            if left := bits & ~(1 << replica):
                self._holders[prefix] = left
            else:
                del self._holders[prefix]

    @property
    def remembered(self) -> int:
        """Hashes that are remembered."""
        return len(self._holders)

    def _order(self, replica: int) -> tuple[float, int, int]:
        return self.loads[replica], self.totals[replica], replica
