"""Which of several forms each weight gets: the fewest bytes below a loss, or the least loss within some bytes.

The loss of a choice is taken for the sum of what each weight adds, and one table of the least loss for every number of
bytes answers both questions. More room never gives more loss, a looser bound never more bytes: the table is the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.quant.scheme import Scheme

STEPS = 1 << 16
"""Most columns of the table: bytes are counted in steps of their common divisor, or of this part of all."""


@dataclass(frozen=True, slots=True)
class Option:
    """A form that a weight may get."""

    scheme: Scheme | None
    """None: it stays as it is."""
    nbytes: int
    nats: float
    """What it adds to the loss of a token, by estimate; from 0 on."""


Options = Sequence[Sequence[Option]]
"""Of each weight; none of them is empty."""


class Choices:
    """All that weights may get, as the least loss for every number of bytes above the fewest that are possible."""

    def __init__(self, options: Options) -> None:
        self.options = options
        fewest = [min(option.nbytes for option in each) for each in options]
        self.smallest = sum(fewest)
        """The fewest bytes."""
        more = [[option.nbytes - least for option in each] for each, least in zip(options, fewest, strict=True)]
        span = sum(max(each) for each in more)
        self._step = max(1, math.gcd(*(size for each in more for size in each)), -(-span // STEPS))
        self._costs = [[-(-size // self._step) for size in each] for each in more]  # rounded up: never over a budget
        self._columns = 1 + sum(max(each) for each in self._costs)
        self._least = torch.zeros(self._columns, dtype=torch.float64)
        self._chosen: list[Tensor] = []
        for each, costs in zip(options, self._costs, strict=True):
            self._add(each, costs)

    def least_bytes(self, max_nats: float) -> list[int] | None:
        """The number of the option that each weight gets, for the fewest bytes; None: nothing adds so little."""
        fits = (self._least <= max_nats).nonzero()
        return self._choice(int(fits[0])) if len(fits) else None

    def least_loss(self, max_bytes: int) -> list[int] | None:
        """The same for the least loss within some bytes; None: nothing is so small."""
        room = (max_bytes - self.smallest) // self._step
        return self._choice(min(room, self._columns - 1)) if room >= 0 else None

    def size(self, picks: Sequence[int]) -> int:
        """Bytes of a choice."""
        return sum(each[pick].nbytes for each, pick in zip(self.options, picks, strict=True))

    def _add(self, options: Sequence[Option], costs: Sequence[int]) -> None:
        """Let one more weight choose, for every number of bytes; of equal losses the first of the smaller ones."""
        before, best = self._least, torch.full_like(self._least, math.inf)
        chosen = torch.zeros(self._columns, dtype=torch.uint8)
        for number in sorted(range(len(options)), key=lambda number: costs[number]):
            cost = costs[number]
            found = torch.full_like(best, math.inf)
            found[cost:] = before[: self._columns - cost] + options[number].nats
            better = found < best
            best, chosen = torch.where(better, found, best), chosen.masked_fill(better, number)
        self._least = best
        self._chosen.append(chosen)

    def _choice(self, column: int) -> list[int]:
        """What each weight gets for the bytes of a column."""
        found = []
        for chosen, costs in zip(reversed(self._chosen), reversed(self._costs), strict=True):
            found.append(int(chosen[column]))
            column -= costs[found[-1]]
        return found[::-1]
