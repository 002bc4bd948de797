"""Reads GPTQ weights in the layout of AutoGPTQ and GPTQModel.

qweight int32 [K / n, N]: n = 32 / bits values of one output in a word, lowest bits first. scales [groups, N],
qzeros int32 [groups, N / n] packed along the outputs, g_idx [K]: the group of each input column.
w = (q - zero) * scale. Version 1 stores zero - 1, wrapped within its bits; version 2 stores zero.
"""

from dataclasses import dataclass

import torch

from outpace.kernels.packed import Packed, unpack_nibbles
from outpace.loading.foreign.format import (
    FLOATS,
    ForeignWeight,
    PackedFormat,
    Parts,
    as_bytes,
    holds,
    in_groups,
    reorder_nibbles,
    unsigned,
)


@dataclass(frozen=True)
class Gptq(PackedFormat):
    """Settings of `quant_method: gptq`."""

    bits: int
    group_size: int | None
    """None: the whole row."""
    symmetric: bool
    version: int
    act_order: bool

    endings = (".qweight", ".scales", ".qzeros", ".g_idx")

    @property
    def label(self) -> str:
        return f"GPTQ int{self.bits}"

    @property
    def peeks(self) -> tuple[str, ...]:
        """The column order, because it decides whether the weight runs as stored."""
        return (".g_idx",)

    def shape(self, parts: Parts) -> tuple[int, int]:
        each = 32 // self.bits
        words, rows = parts.take(".qweight", [(None, None)], torch.int32).shape
        columns = words * each
        groups = -(-columns // self._group(columns))
        parts.take(".scales", [(groups, rows)], *FLOATS)
        parts.take(".qzeros", [(groups, -(-rows // each))], torch.int32)
        order = parts.maybe(".g_idx", [(columns,)], torch.int32, torch.int64)
        if self.act_order:
            if order is None:
                raise parts.error("g_idx is missing, which desc_act needs")
            in_groups(parts, order, columns, self._group(columns))
        return rows, columns

    def packed(self, parts: Parts) -> ForeignWeight:
        rows, columns = shape = self.shape(parts)
        group = self._group(columns)
        scale = parts.tensors[".scales"].T.contiguous()
        stored = as_bytes(parts.tensors[".qzeros"])
        zero = unpack_nibbles(stored, rows) if self.bits == 4 else stored[:, :rows]
        if self.version == 1:
            zero = (zero + 1) & (2**self.bits - 1)
        values = as_bytes(parts.tensors[".qweight"].T)
        order = in_groups(parts, parts.tensors.get(".g_idx"), columns, group)
        if self.symmetric and not holds(zero == 2 ** (self.bits - 1)):
            raise parts.error("sym is true, but its zero points are not those of symmetric weights", "set sym to false")
        zeros = None if self.symmetric else zero.T.contiguous()
        if self.bits == 8:
            values = values if order is None else values[:, order]
            return ForeignWeight(unsigned(values, zeros, scale, group), order)
        values = values if order is None else reorder_nibbles(values, order)
        return ForeignWeight(Packed(values, scale, None if zeros is None else zeros.half(), shape, group), order)

    def _group(self, columns: int) -> int:
        return max(1, columns if self.group_size is None else min(self.group_size, columns))
