"""Reads mxfp4 weights, the format of GPT-OSS's experts: 32 4-bit values (e2m1) share a power of two (e8m0).

For each expert: blocks uint8 [N, K / 32, 16] with two values in a byte, low half first; scales uint8 [N, K / 32],
exponent + 127. `Packed` cannot represent these values. The model's own tensor is the transpose, [K, N].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.loading.foreign.format import Format, Parts

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Mxfp4(Format):
    """`quant_method: mxfp4`, which has no settings."""

    label = "mxfp4"
    endings = ("_blocks", "_scales")
    makes = ""
    dims = 3
    transposed = True

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, groups, _ = parts.take("_blocks", [(None, None, 16)], torch.uint8).shape
        parts.take("_scales", [(rows, groups)], torch.uint8)
        return rows, groups * 32

    def dequantized(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape(parts)
        blocks, scales = parts.tensors["_blocks"], parts.tensors["_scales"]
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
        weight = torch.empty(rows, columns, dtype=dtype)
        step = max(1, _AT_ONCE // max(1, columns))
        for start in range(0, rows, step):
            block = blocks[start : start + step]
            numbers = table[torch.stack((block & 15, block >> 4), dim=-1).long()].flatten(2)
            powers = scales[start : start + step].view(torch.float8_e8m0fnu).float()
            weight[start : start + step] = (numbers * powers.unsqueeze(2)).flatten(1)
        return weight
