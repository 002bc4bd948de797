"""Types that all rows share: their time, the models, and the results."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

FULL = 10.0
"""Minutes of a full run, in which each fault is repeated as often as its row specifies."""


@dataclass(frozen=True)
class Result:
    """One row of the table of results, without its name."""

    target: str
    measured: str
    passed: bool
    runs: str
    """Number of repetitions, or duration."""


Row = TypeVar("Row", bound=Callable[..., Awaitable[Result]])


def by_name(*rows: Row) -> dict[str, Row]:
    """Rows under their ids in docs/reliability.md: the function f7b is the row F-7b."""
    return {f"{row.__name__[0].upper()}-{row.__name__[1:]}": row for row in rows}


@dataclass
class Soak:
    """One run: its duration, the models, and details for the plot."""

    model: Path
    """A model whose steps take milliseconds, like those of real models."""
    small: Path
    """A model whose steps take almost no time."""
    minutes: float = FULL
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    say: Callable[[str], None] = lambda text: None
    """Called with the progress of a row."""
    details: dict[str, Any] = field(default_factory=dict)

    def count(self, full: int) -> int:
        """Repetitions of a fault: `full` in ten minutes or more, fewer in a shorter run."""
        return max(1, round(full * min(1.0, self.minutes / FULL)))

    def seconds(self, full: float) -> float:
        """Duration of a load that takes `full` seconds in a full run."""
        return max(1.0, full * self.minutes / FULL)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed; 0 without values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else 0.0
