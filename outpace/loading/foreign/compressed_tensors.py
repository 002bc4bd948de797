"""Reads weights in the compressed-tensors format of llm-compressor: packed into words, or one byte each.

`pack-quantized`: weight_packed int32 [N, K / n], n = 32 / bits numbers + 2^(bits - 1) in a word, the lowest bits first,
the last word of a row padded; weight_shape [2]; weight_zero_point int32 [N / n, groups] packed in the same way
along the outputs. `int-quantized`, `float-quantized`, `naive-quantized`: weight [N, K] in int8 or float8_e4m3fn, zero
points in int8. w = (q - zero) * scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.packed import Packed, unpack_nibbles
from outpace.loading.foreign.format import (
    FLOATS,
    ForeignWeight,
    PackedFormat,
    Parts,
    Span,
    as_bytes,
    holds,
    in_groups,
    reorder_nibbles,
    scale_of,
    unsigned,
)
from outpace.quant.scheme import Activations

_G_IDX = ".weight_g_idx"


@dataclass(frozen=True)
class PackQuantized(PackedFormat):
    """A group of `format: pack-quantized`, of 4 or 8 bits."""

    bits: int
    span: Span
    symmetric: bool
    act_order: bool

    endings = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", _G_IDX)

    @property
    def label(self) -> str:
        return f"compressed-tensors int{self.bits}"

    @property
    def peeks(self) -> tuple[str, ...]:
        """The shape, because words are padded, and the column order, because it decides whether the weight runs as
        stored."""
        return (".weight_shape", _G_IDX)

    def shape(self, parts: Parts) -> tuple[int, int]:
        each = 32 // self.bits
        rows, columns = parts.take(".weight_shape", [(2,)], torch.int32, torch.int64).tolist()
        parts.take(".weight_packed", [(rows, -(-columns // each))], torch.int32)
        scale = scale_of(parts, ".weight_scale", self.span, (rows, columns), *FLOATS)
        if not self.symmetric:
            parts.take(".weight_zero_point", [(-(-rows // each), scale.shape[1])], torch.int32)
        elif ".weight_zero_point" in parts.tensors:
            raise parts.error("it has zero points, but config.json says that it is symmetric")
        _check_order(parts, columns, self.span, self.act_order)
        return rows, columns

    def packed(self, parts: Parts) -> ForeignWeight:
        rows, columns = shape = self.shape(parts)
        scale = scale_of(parts, ".weight_scale", self.span, shape, *FLOATS)
        block, group = self.span.of(parts, shape)
        zero = None if self.symmetric else self._zeros(parts.tensors[".weight_zero_point"], rows)
        values = as_bytes(parts.tensors[".weight_packed"])
        order = _order(parts, columns, group)
        if self.bits == 8:
            values = values[:, :columns] if order is None else values[:, order]
            return ForeignWeight(unsigned(values, zero, scale, group, block), order)
        values = values[:, : -(-columns // 2)].contiguous() if order is None else reorder_nibbles(values, order)
        return ForeignWeight(Packed(values, scale, None if zero is None else zero.half(), shape, group, block), order)

    def _zeros(self, words: Tensor, rows: int) -> Tensor:
        """int32 [N / n, groups] → uint8 [N, groups]."""
        stored = as_bytes(words.T)
        return (unpack_nibbles(stored, rows) if self.bits == 4 else stored[:, :rows]).T.contiguous()


@dataclass(frozen=True)
class Quantized(PackedFormat):
    """A group whose weights are one byte each: int8 or float8_e4m3fn."""

    dtype: torch.dtype
    span: Span
    symmetric: bool
    act_order: bool
    activations: Activations | None = None

    endings = (".weight", ".weight_scale", ".weight_zero_point", _G_IDX)

    @property
    def label(self) -> str:
        return f"compressed-tensors {'int8' if self.dtype == torch.int8 else 'fp8'}"

    @property
    def peeks(self) -> tuple[str, ...]:
        return (_G_IDX,)

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, columns = parts.take(".weight", [(None, None)], self.dtype).shape
        scale_of(parts, ".weight_scale", self.span, (rows, columns), *FLOATS)
        shapes = self.span.stored(parts, (rows, columns))
        if self.symmetric:
            parts.maybe(".weight_zero_point", shapes, torch.int8, self.dtype)
        else:
            parts.take(".weight_zero_point", shapes, torch.int8, self.dtype)
        _check_order(parts, columns, self.span, self.act_order)
        return rows, columns

    def packed(self, parts: Parts) -> ForeignWeight:
        rows, columns = shape = self.shape(parts)
        scale = scale_of(parts, ".weight_scale", self.span, shape, *FLOATS)
        block, group = self.span.of(parts, shape)
        stored = parts.tensors.get(".weight_zero_point")
        zero = None if stored is None else stored.float().half().reshape(scale.shape)
        values, order = parts.tensors[".weight"], _order(parts, columns, group)
        if order is not None:
            values = values.view(torch.uint8)[:, order].view(self.dtype)  # fp8 indexing is not supported on all devices
        if self.symmetric and zero is not None:
            if not holds(zero == 0):
                raise parts.error("it has zero points, but config.json says that it is symmetric")
            zero = None
        return ForeignWeight(Packed(values, scale, zero, shape, group, min(block, max(1, rows))), order)


def _check_order(parts: Parts, columns: int, span: Span, act_order: bool) -> None:
    order = parts.maybe(_G_IDX, [(columns,)], torch.int32, torch.int64)
    if act_order:
        if order is None:
            raise parts.error("weight_g_idx is missing, which actorder needs")
        _order(parts, columns, columns if span.group is None else span.group)


def _order(parts: Parts, columns: int, group: int) -> Tensor | None:
    """The columns group by group; None, or -1 in weight_g_idx: they are in order."""
    order = parts.tensors.get(_G_IDX)
    return None if order is None or bool((order == -1).any()) else in_groups(parts, order, columns, group)
