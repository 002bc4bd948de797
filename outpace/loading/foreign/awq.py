"""Reads AWQ weights in the `gemm` layout of AutoAWQ.

qweight int32 [K, N / 8]: eight outputs of one input column in a word; nibble i, lowest first, is output _ORDER[i] of
the eight. qzeros [groups, N / 8] is packed in the same way, scales [groups, N]. w = (q - zero) * scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.packed import Packed, pack_nibbles, unpack_nibbles
from outpace.loading.foreign.format import FLOATS, ForeignWeight, PackedFormat, Parts, as_bytes

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_OUTPUT = tuple(_ORDER.index(output) for output in range(8))


@dataclass(frozen=True)
class Awq(PackedFormat):
    """Settings of `quant_method: awq`."""

    group_size: int | None
    """None: the whole row."""

    label = "AWQ int4"
    endings = (".qweight", ".scales", ".qzeros")

    def shape(self, parts: Parts) -> tuple[int, int]:
        columns, words = parts.take(".qweight", [(None, None)], torch.int32).shape
        group = columns if self.group_size is None else self.group_size
        if columns % max(1, group):
            raise parts.error(f"groups of {group} do not divide its {columns} columns")
        groups = columns // max(1, group)
        parts.take(".scales", [(groups, words * 8)], *FLOATS)
        parts.take(".qzeros", [(groups, words)], torch.int32)
        return words * 8, columns

    def packed(self, parts: Parts) -> ForeignWeight:
        rows, columns = shape = self.shape(parts)
        values, zero = (_outputs(parts.tensors[ending], rows) for ending in (".qweight", ".qzeros"))
        scale = parts.tensors[".scales"].T.contiguous()
        group = max(1, columns if self.group_size is None else self.group_size)
        return ForeignWeight(
            Packed(pack_nibbles(values.T.contiguous()), scale, zero.T.contiguous().half(), shape, group)
        )


def _outputs(words: Tensor, rows: int) -> Tensor:
    """int32 [K, N / 8] → uint8 [K, N]."""
    nibbles = unpack_nibbles(as_bytes(words), rows)
    return nibbles.unflatten(1, (-1, 8))[..., list(_NIBBLE_OF_OUTPUT)].flatten(1)
