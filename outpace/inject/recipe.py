"""What a weight is made of: tensors of the model by their names, and where each of them goes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scheme = Literal["plain"]
"""How a weight is kept: as it comes, in the model's dtype."""
Order = Literal["heads", "groups", "quarters"]
"""Rows of a fused qkv that is not stored as all q, all k, all v (see `Policy.qkv_layout`)."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of a tensor, along one dimension."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which row of the weight each row of the tensor is."""

    kind: Order
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def rows(self) -> Tensor:
        """[N]: for each row of the tensor, its row in the weight."""
        taken = _ORDERS[self.kind](self)
        rows = torch.empty_like(taken)
        rows[taken] = torch.arange(len(taken))
        return rows


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the model in a weight."""

    name: str
    """The model's own, as before injection."""
    shape: tuple[int, ...]
    """As the model has it, whole."""
    start: int = 0
    """The first row of the weight that it fills."""
    transposed: bool = False
    """The model keeps it [in, out]."""
    order: RowOrder | None = None
    slice: Slice | None = None
    """None: the whole tensor."""

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of what is taken of it."""
        sizes = list(self.shape)
        if self.slice is not None:
            sizes[self.slice.dim] = self.slice.length
        return tuple(sizes)

    @property
    def shape_in_weight(self) -> tuple[int, ...]:
        """The shape of what it fills."""
        return self.stored[::-1] if self.transposed else self.stored

    def place(self, weight: Tensor) -> Tensor:
        """What it fills, seen in the shape that it comes in."""
        place = weight.narrow(0, self.start, self.shape_in_weight[0]) if weight.dim() else weight
        return place.t() if self.transposed else place


@dataclass(frozen=True, slots=True)
class Recipe:
    """A weight. Rows that no part fills are zero."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    scheme: Scheme = "plain"

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "Recipe":
        """A weight that is a tensor of the model."""
        return cls(shape, (Part(name, shape),))

    @classmethod
    def joined(
        cls,
        tensors: list[tuple[str, tuple[int, ...]] | int],
        *,
        transposed: bool = False,
        order: RowOrder | None = None,
    ) -> "Recipe":
        """Tensors one below the other; a number instead of one: so many rows of zeros."""
        parts: list[Part] = []
        start, rest = 0, tuple[int, ...]()
        for tensor in tensors:
            if isinstance(tensor, int):
                start += tensor
                continue
            part = Part(*tensor, start=start, transposed=transposed and len(tensor[1]) > 1, order=order)
            parts.append(part)
            start, rest = start + part.shape_in_weight[0], part.shape_in_weight[1:]
        return cls((start, *rest), tuple(parts))

    @property
    def is_whole(self) -> bool:
        """Whether it is a tensor of the model, unchanged."""
        return self == Recipe.whole(self.parts[0].name, self.shape) if len(self.parts) == 1 else False

    @property
    def has_gaps(self) -> bool:
        """Whether some rows are nobody's."""
        return bool(self.shape) and sum(part.shape_in_weight[0] for part in self.parts) < self.shape[0]


def _heads(order: RowOrder) -> Tensor:
    """Rows of [heads, (q, k, v), D] as all q, all k, all v."""
    rows = torch.arange(3 * order.num_heads * order.head_dim).view(order.num_heads, 3, order.head_dim)
    return rows.transpose(0, 1).reshape(-1)


def _groups(order: RowOrder) -> Tensor:
    """Rows of [groups, (q.., k, v), D] as all q, all k, all v."""
    groups, size = order.num_kv_heads, order.num_heads // order.num_kv_heads
    rows = torch.arange((order.num_heads + 2 * groups) * order.head_dim).view(groups, size + 2, order.head_dim)
    return torch.cat([rows[:, :size].reshape(-1), rows[:, size].reshape(-1), rows[:, size + 1].reshape(-1)])


def _quarters(order: RowOrder) -> Tensor:
    """Rows of [4, (q.., v.., k..)] as all q, all k, all v."""
    rows = torch.arange(3 * order.num_heads * order.head_dim).view(4, 3, -1)
    return rows[:, [0, 2, 1]].transpose(0, 1).reshape(-1)


_ORDERS: dict[Order, Callable[[RowOrder], Tensor]] = {"heads": _heads, "groups": _groups, "quarters": _quarters}
