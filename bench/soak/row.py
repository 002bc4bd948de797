"""What a row of the table says, and what rows share."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FULL = 10.0
"""Minutes in which every row runs as often as its table says."""


@dataclass(frozen=True)
class Result:
    """One row of the table of results."""

    row: str
    target: str
    measured: str
    passed: bool
    runs: str
    """How often, or how long."""


@dataclass
class Soak:
    """One run: how long it may take, where the model is, and what is kept for the plot."""

    model: Path
    """A step of it takes milliseconds, as those of real models do."""
    small: Path
    """One whose steps take next to nothing."""
    minutes: float = FULL
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    say: Callable[[str], None] = lambda text: None
    """Told how far a row is."""
    details: dict[str, Any] = field(default_factory=dict)

    def count(self, full: int) -> int:
        """Repetitions of a fault: the table's in ten minutes or more, fewer in less."""
        return max(1, round(full * min(1.0, self.minutes / FULL)))

    def seconds(self, full: float) -> float:
        """Duration of a load that takes `full` seconds of ten minutes."""
        return max(1.0, full * self.minutes / FULL)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of the values do not pass; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
