"""Chooses a scheme for each weight: the fewest bytes within a loss, or the least loss within a number of bytes.

The loss of a choice is estimated as the sum of the losses of its weights. One table (a knapsack by dynamic programming)
holds the least loss for each number of bytes and answers both questions, so a looser bound never gives a worse choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.quant.scheme import Scheme

STEPS = 1 << 16
"""Maximum columns of the table: bytes are counted in steps of their common divisor, or of this fraction of the
range."""


@dataclass(frozen=True, slots=True)
class Option:
    """A scheme that a weight may get."""

    scheme: Scheme | None
    """None: the weight is not quantized."""
    nbytes: int
    nats: float
    """Estimated increase of the loss per token; at least 0."""


Options = Sequence[Sequence[Option]]
"""The options of each weight, at least one."""


class Choices:
    """The options of all weights, as a table of the least loss for each number of bytes above the minimum."""

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
        """The index of each weight's option in the choice with the fewest bytes; None: no choice is within the loss."""
        fits = (self._least <= max_nats).nonzero()
        return self._choice(int(fits[0])) if len(fits) else None

    def least_loss(self, max_bytes: int) -> list[int] | None:
        """The same for the least loss within `max_bytes`; None: no choice is that small."""
        room = (max_bytes - self.smallest) // self._step
        return self._choice(min(room, self._columns - 1)) if room >= 0 else None

    def size(self, picks: Sequence[int]) -> int:
        return sum(each[pick].nbytes for each, pick in zip(self.options, picks, strict=True))

    def _add(self, options: Sequence[Option], costs: Sequence[int]) -> None:
        """Add a weight to the table; among equal losses, the smaller option that comes first wins."""
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
        """Each weight's option in the choice of a column."""
        found = []
        for chosen, costs in zip(reversed(self._chosen), reversed(self._costs), strict=True):
            found.append(int(chosen[column]))
            column -= costs[found[-1]]
        return found[::-1]
