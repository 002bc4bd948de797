"""The base classes of other projects' quantized formats: the stored tensors of a weight become a `Packed`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.kernels.packed import Packed, pack_nibbles
from outpace.loading.dtypes import short
from outpace.quant.scheme import Activations

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AT_ONCE = 1 << 24
"""Number of values that are dequantized at once, with a few float32 copies in memory."""


@dataclass(frozen=True)
class Parts:
    """The stored tensors of one weight, on the meta device until they are read."""

    stem: str
    """Common beginning of their names."""
    tensors: Mapping[str, Tensor]
    """Ending of the name -> tensor."""

    def take(self, ending: str, shapes: Sequence[Sequence[int | None]], *dtypes: torch.dtype) -> Tensor:
        """A required tensor with one of these shapes (None: any size) and dtypes."""
        tensor = self.maybe(ending, shapes, *dtypes)
        if tensor is None:
            raise self.error(f"{ending.lstrip('._') or 'the weight'} is missing")
        return tensor

    def maybe(self, ending: str, shapes: Sequence[Sequence[int | None]], *dtypes: torch.dtype) -> Tensor | None:
        """The same for an optional tensor."""
        tensor = self.tensors.get(ending)
        if tensor is None:
            return None
        if tensor.dtype not in dtypes:
            raise self.error(f"{ending} is {short(tensor.dtype)} instead of {' or '.join(map(short, dtypes))}")
        if not any(_fits(tensor.shape, shape) for shape in shapes):
            wanted = " or ".join(str([size if size is not None else "any" for size in shape]) for shape in shapes)
            raise self.error(f"{ending} has the shape {list(tensor.shape)} instead of {wanted}")
        return tensor

    def error(self, problem: str, remedy: str = "download the model again") -> ModelError:
        return ModelError(f"model: {self.stem}: {problem}; {remedy}")


@dataclass(frozen=True)
class ForeignWeight:
    """A weight as the checkpoint stores it."""

    packed: Packed
    columns: Tensor | None = None
    """Input column of each column of `packed` (act-order); None: in order."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K], computed in float32 and rounded once."""
        rows, columns = self.packed.shape
        weight = torch.empty(rows, columns, dtype=dtype)
        block = min(self.packed.block, max(1, rows))
        step = block * max(1, _AT_ONCE // max(1, block * columns))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            part = self.packed.narrow(start, count).dequantized(dtype)
            if self.columns is None:
                weight[start : start + count] = part
            else:
                weight[start : start + count].index_copy_(1, self.columns, part)
        return weight


class Format(ABC):
    """How a weight is stored. Its fields are settings from the checkpoint's config."""

    endings: tuple[str, ...]
    """Endings of the names of a weight's tensors; the first is the weight itself."""
    makes: str = ".weight"
    """Ending of the name of the converted weight."""
    dims: int = 2
    """Dimensions of the first tensor; with one more it is a stack of experts."""
    transposed: bool = False
    """Whether the model's own tensor is the transpose of the stored one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Its name in the log."""

    @property
    def peeks(self) -> tuple[str, ...]:
        """Endings of small tensors whose values are needed to check the others."""
        return ()

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, int]:
        """Check the tensors and return (N, K) of the weight. Reads no values except those of `peeks`."""

    @abstractmethod
    def dequantized(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The converted weight [N, K]."""


class PackedFormat(Format):
    """A format that `Packed` can represent exactly."""

    activations: Activations | None = None
    """The scheme of activations, if our kernels support it; None: they are not quantized."""

    @abstractmethod
    def packed(self, parts: Parts) -> ForeignWeight:
        """The weight as it is stored, its columns in the order of groups; on the meta device only shapes and dtypes."""

    def dequantized(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return self.packed(parts).dequantized(dtype)


@dataclass(frozen=True)
class Span:
    """Rows and columns that share a scale."""

    block: int | None = 1
    """Rows; None: all."""
    group: int | None = None
    """Columns; None: all."""
    whole_groups: bool = True
    """Whether the format requires that groups divide the columns."""

    def of(self, parts: Parts, shape: tuple[int, int]) -> tuple[int, int]:
        """(block, group) for a weight of this shape."""
        rows, columns = shape
        group = columns if self.group is None else min(self.group, columns)
        if self.block == 1 and self.whole_groups and columns % max(1, group):
            raise parts.error(f"groups of {group} do not divide its {columns} columns")
        return max(1, rows if self.block is None else self.block), max(1, group)

    def stored(self, parts: Parts, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """The shapes that the scales may have, the full one first."""
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


def unsigned(values: Tensor, zero: Tensor | None, scale: Tensor, group: int, block: int = 1) -> Packed:
    """A Packed of unsigned values 0..255 [N, K]. zero: also unsigned; None: 128."""
    signed = (values.to(torch.int16) - 128).to(torch.int8)
    shape = (signed.shape[0], signed.shape[1])
    return Packed(signed, scale, None if zero is None else (zero.float() - 128).half(), shape, group, block)


def in_groups(parts: Parts, order: Tensor | None, columns: int, group: int) -> Tensor | None:
    """The columns sorted by group. order: the group of each column. None: they are in order already."""
    if order is None or bool((order == torch.arange(columns) // group).all()):
        return None
    arranged, found = order.long().sort(stable=True)
    if not torch.equal(arranged, torch.arange(columns) // group):
        raise parts.error(f"g_idx does not put {group} columns into each group, so scales cannot be assigned")
    return found


def reorder_nibbles(values: Tensor, columns: Tensor) -> Tensor:
    """Reorder the columns of packed 4-bit values [N, K]."""
    low_and_high = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    return pack_nibbles(low_and_high[:, columns])


def holds(condition: Tensor) -> bool:
    """Whether a condition holds for all values; assumed to be true on the meta device."""
    return condition.is_meta or bool(condition.all())


def as_bytes(words: Tensor) -> Tensor:
    """int32 [..., W] → uint8 [..., 4 W], the lowest byte of each word first."""
    if not words.is_contiguous() or words.stride(-1) != 1:  # a dimension of 1 may have any stride
        words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    sizes = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(want in (None, size) for size, want in sizes)
