"""What every quantized format of other people has in common: the stored tensors of one weight become a `Packed`."""

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
"""Weights that are dequantized at a time: a few copies of them in float32 are in memory meanwhile."""


@dataclass(frozen=True)
class Parts:
    """The stored tensors of one weight. Before the weights are read they are on the meta device."""

    stem: str
    """What their names begin with."""
    tensors: Mapping[str, Tensor]
    """By the rest of their names."""

    def take(self, ending: str, shapes: Sequence[Sequence[int | None]], *dtypes: torch.dtype) -> Tensor:
        """A tensor that must be there, of one of these shapes (None: any size) and dtypes."""
        tensor = self.maybe(ending, shapes, *dtypes)
        if tensor is None:
            raise self.error(f"{ending.lstrip('._') or 'the weight'} is missing")
        return tensor

    def maybe(self, ending: str, shapes: Sequence[Sequence[int | None]], *dtypes: torch.dtype) -> Tensor | None:
        """The same for a tensor that may be missing."""
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
        """An error about this weight."""
        return ModelError(f"model: {self.stem}: {problem}; {remedy}")


@dataclass(frozen=True)
class ForeignWeight:
    """A weight from the bits of a checkpoint."""

    packed: Packed
    columns: Tensor | None = None
    """The input column that each column of `packed` is (act-order); None: they are in order."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that the format defines, computed in float32 and rounded once."""
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
    """How one weight is stored. All fields are settings of the checkpoint's config."""

    endings: tuple[str, ...]
    """Of the names of the tensors that belong to a weight; the first one is the weight itself."""
    makes: str = ".weight"
    """The ending of the name of the plain weight."""
    dims: int = 2
    """Of the first tensor; with one more it is a stack of experts."""
    transposed: bool = False
    """Whether the model's own tensor is the transpose of what is stored."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What the log calls it."""

    @property
    def peeks(self) -> tuple[str, ...]:
        """Small tensors whose values are needed to check the others."""
        return ()

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, int]:
        """(N, K) of the weight; what does not fit is an error. Reads no values except those of `peeks`."""

    @abstractmethod
    def dequantized(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The plain weight [N, K]."""


class PackedFormat(Format):
    """A format that `Packed` can hold bit for bit."""

    activations: Activations | None = None
    """What rows become before they are multiplied, as far as our products do it so; None: they stay as they are."""

    @abstractmethod
    def packed(self, parts: Parts) -> ForeignWeight:
        """The weight as it is stored; of tensors on the meta device, its form."""

    def dequantized(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The plain weight [N, K]."""
        return self.packed(parts).dequantized(dtype)


def unsigned(values: Tensor, zero: Tensor | None, scale: Tensor, group: int, block: int = 1) -> Packed:
    """A Packed of unsigned numbers 0..255 [N, K]; zero: unsigned too, None: 128."""
    signed = (values.to(torch.int16) - 128).to(torch.int8)
    shape = (signed.shape[0], signed.shape[1])
    return Packed(signed, scale, None if zero is None else (zero.float() - 128).half(), shape, group, block)


def in_groups(parts: Parts, order: Tensor | None, columns: int, group: int) -> Tensor | None:
    """The columns group by group, from the group of each column; None: they are in order already."""
    if order is None or bool((order == torch.arange(columns) // group).all()):
        return None
    arranged, found = order.long().sort(stable=True)
    if not torch.equal(arranged, torch.arange(columns) // group):
        raise parts.error(f"g_idx does not put {group} columns into every group, so that scales cannot be told")
    return found


def reorder_nibbles(values: Tensor, columns: Tensor) -> Tensor:
    """Columns of 4-bit numbers [N, K] that are packed two to a byte, put in another order."""
    low_and_high = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    return pack_nibbles(low_and_high[:, columns])


def holds(condition: Tensor) -> bool:
    """Whether something is true of all numbers; on the meta device it is taken to be."""
    return condition.is_meta or bool(condition.all())


def as_bytes(words: Tensor) -> Tensor:
    """int32 [..., W] → uint8 [..., 4 W], the lowest byte of each word first."""
    if not words.is_contiguous() or words.stride(-1) != 1:  # a dimension of 1 may have any stride
        words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    sizes = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(want in (None, size) for size, want in sizes)
