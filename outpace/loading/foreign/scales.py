"""Where the scales of a weight apply: to all of it, to rows, to groups of columns, to blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.loading.foreign.format import Parts


@dataclass(frozen=True)
class Span:
    """Rows and columns that share a scale."""

    block: int | None = 1
    """Rows; None: all."""
    group: int | None = None
    """Columns; None: all."""
    whole_groups: bool = True
    """Whether the format demands that groups of columns divide the columns."""

    def of(self, parts: Parts, shape: tuple[int, int]) -> tuple[int, int]:
        """(block, group) for a weight of this shape."""
        rows, columns = shape
        group = columns if self.group is None else min(self.group, columns)
        if self.block == 1 and self.whole_groups and columns % max(1, group):
            raise parts.error(f"groups of {group} do not divide its {columns} columns")
        return max(1, rows if self.block is None else self.block), max(1, group)

    def stored(self, parts: Parts, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """The shapes that scales of such a weight may have, the full one first."""
        block, group = self.of(parts, shape)
        full = (-(-shape[0] // block), -(-shape[1] // group))
        shorter: list[tuple[int, ...]] = [(), (1,)] if full == (1, 1) else [(full[0],)] if full[1] == 1 else []
        return [full, *shorter]


TENSOR = Span(block=None)
CHANNEL = Span()


def scale_of(parts: Parts, ending: str, span: Span, shape: tuple[int, int], *dtypes: torch.dtype) -> Tensor:
    """The scales [ceil(N / block), ceil(K / group)]."""
    shapes = span.stored(parts, shape)
    return parts.take(ending, shapes, *dtypes).reshape(shapes[0])
