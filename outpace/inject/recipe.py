"""How a weight is made: tensors of the model by name, and where each goes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from outpace.quant.scheme import Scheme

Order = Literal["heads", "groups", "quarters"]
"""Other orders of the rows of a fused qkv than all q, all k, all v (see `Policy.qkv_layout`)."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of a tensor, along one dimension."""

    dim: int
    start: int
    length: int


class Ordering(Protocol):
    """Maps rows of a tensor to rows of the weight."""

    def rows(self) -> Tensor:
        """[N]: for each row of the tensor, its row in the weight."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of a fused qkv."""

    kind: Order
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def rows(self) -> Tensor:
        taken = _ORDERS[self.kind](self)
        rows = torch.empty_like(taken)
        rows[taken] = torch.arange(len(taken))
        return rows


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Rows stored as gate, up, gate, up, ..: in the weight all gates come first, then all ups."""

    count: int

    def rows(self) -> Tensor:
        return torch.arange(2 * self.count).view(2, -1).t().reshape(-1)


@dataclass(frozen=True, slots=True)
class Portion:
    """The order of a rank's rows in its smaller weight: the same order as in the whole weight."""

    whole: Ordering
    spans: tuple[tuple[int, int], ...]
    """Rows of the tensor that the weight has."""
    span: int
    """Index of the span of these rows."""

    def rows(self) -> Tensor:
        every = self.whole.rows()
        taken = torch.cat([every[first:last] for first, last in self.spans])
        before = sum(last - first for first, last in self.spans[: self.span])
        first, last = self.spans[self.span]
        return taken.argsort().argsort()[before : before + last - first]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the model in a weight."""

    name: str
    """Its name in the model before injection."""
    shape: tuple[int, ...]
    """Of the whole tensor, as stored."""
    start: int = 0
    """Its first row in the weight."""
    transposed: bool = False
    """Stored [in, out], or [experts, in, out]."""
    order: Ordering | None = None
    slices: tuple[Slice, ...] = ()
    """The part that is taken, one slice per dimension; none: the whole tensor."""
    expert: int | None = None
    """Its (first) index in stacked weights; None: the weight is not stacked, or the tensor is the whole stack."""
    dim: int = 0
    """The dimension of `start` and `order` in the filled part: 1 in stacked weights."""

    @property
    def stored(self) -> tuple[int, ...]:
        sizes = list(self.shape)
        for each in self.slices:
            sizes[each.dim] = each.length
        return tuple(sizes)

    @property
    def shape_in_weight(self) -> tuple[int, ...]:
        sizes = self.stored
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else sizes

    @property
    def rows_dim(self) -> int:
        """The dimension of the tensor that becomes the rows of the weight."""
        return self.swapped(self.dim)

    def swapped(self, dim: int) -> int:
        """The weight's dimension for one of the tensor's, or the reverse."""
        last = len(self.shape) - 1
        return last + last - 1 - dim if self.transposed and dim >= last - 1 else dim

    def place(self, weight: Tensor) -> Tensor:
        """A view of the part of the weight that it fills, in the stored shape."""
        place = weight
        if self.expert is not None:  # a slice of all experts, or the tensor of one expert
            several = len(self.shape) == weight.dim()
            place = weight.narrow(0, self.expert, self.stored[0]) if several else weight[self.expert]
        if place.dim() and self.order is None:  # ordered rows may go anywhere in the weight
            place = place.narrow(self.dim, self.start, self.shape_in_weight[self.dim])
        return place.transpose(-1, -2) if self.transposed else place


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a weight is made. Rows without a part are zero."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    scheme: Scheme | None = None
    """How the whole weight is quantized; None: not at all."""

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "Recipe":
        """A weight that is one tensor of the model."""
        return cls(shape, (Part(name, shape),))

    @classmethod
    def joined(
        cls,
        tensors: list[tuple[str, tuple[int, ...]] | int],
        *,
        transposed: bool = False,
        order: Ordering | None = None,
    ) -> "Recipe":
        """Tensors one below the other. A number stands for that many rows of zeros."""
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

    @classmethod
    def stack(
        cls, name: str, shape: tuple[int, ...], *, transposed: bool = False, order: Ordering | None = None
    ) -> "Recipe":
        """Stacked weights [E, out, in], or biases [E, out], that are one tensor of the model."""
        part = Part(name, shape, transposed=transposed and len(shape) > 2, order=order, dim=1 if order else 0)
        return cls(part.shape_in_weight, (part,))

    @classmethod
    def stacked(cls, experts: list[list[tuple[str, tuple[int, ...]] | int]], *, transposed: bool = False) -> "Recipe":
        """The same from separate tensors of each expert, joined as in `joined`."""
        each = [cls.joined(tensors, transposed=transposed) for tensors in experts]
        parts = [replace(part, expert=number) for number, recipe in enumerate(each) for part in recipe.parts]
        return cls((len(each), *each[0].shape), tuple(parts))

    @property
    def is_whole(self) -> bool:
        """Whether it is one tensor of the model, unchanged."""
        return self == Recipe.whole(self.parts[0].name, self.shape) if len(self.parts) == 1 else False

    @property
    def has_gaps(self) -> bool:
        """Whether some rows have no part."""
        return sum(math.prod(part.stored) for part in self.parts) < math.prod(self.shape)


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
