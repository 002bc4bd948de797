"""Products with int4 and int8 weights in groups on a CPU, by torch's kernel for int4, which computes in bf16.

It reads the weight in tiles of 64 rows, in which a byte has rows n and n + 32 of one column in its halves. An int8
weight is stored as two of int4 side by side, its high and its low halves: [N, 2 K], multiplied with [x, x]. Tiles take
as many bytes as the usual order, and a weight is kept in one of the two orders only.

Rows, scales and results are rounded to bf16: perplexity of SmolLM2 in int4 changed by 0.004 % and 0.04 %. For
fp32 give `kernels={"packed_linear": "torch"}`: weights are then dequantized at every step, which is slower.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.packed import INT4_ZERO, Packed, pack_nibbles, unpack_nibbles

TILE = 64  # rows of a tile, on CPUs with AVX-512
GROUPS = (32, 64, 128, 256)  # what the kernel takes
MOST_ROWS = {1: 64, 2: 32}
"""The most rows of a product from tiles, by the planes of the weight; with more rows the weight is dequantized.

[3072, 576] of int4 on one core: 32 rows 1.3 ms against 1.4 and 0.8 to dequantize, 512 rows 42 against 28.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight [N, K] in groups, as tiles of 4 bits."""

    values: Tensor
    """uint8 [N / 64, planes * K, 32]"""
    pairs: Tensor
    """bf16 [planes * K / group, N, 2]: the scale of each group, and the number that 8 stands for."""
    scale: Tensor
    """As in `Packed`, as is zero."""
    zero: Tensor | None
    shape: tuple[int, int]
    group: int

    @classmethod
    def of(cls, weight: Packed) -> "TiledWeight":
        """Put a weight in tiles."""
        if weight.kind == "int4":
            halves = unpack_nibbles(weight.values, weight.shape[1])
        else:
            bytes_ = weight.values.view(torch.uint8) ^ 0x80  # 0 .. 255
            halves = torch.cat((bytes_ >> 4, bytes_ & 15), dim=1)
        tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(halves.to(torch.int32), 1)
        return cls.of_tiles(
            tiles.view(-1, halves.shape[1], TILE // 2), weight.scale, weight.zero, weight.shape, weight.group
        )

    @classmethod
    def of_tiles(
        cls, tiles: Tensor, scale: Tensor, zero: Tensor | None, shape: tuple[int, int], group: int
    ) -> "TiledWeight":
        """From values that are in tiles already."""
        scales, int4 = scale.float().t(), tiles.shape[1] == shape[1]  # [K / group, N]
        zeros = (INT4_ZERO if int4 else 0.0) if zero is None else zero.float().t()
        pairs = torch.stack((scales, (INT4_ZERO - zeros) * scales), dim=-1)
        if not int4:
            pairs = torch.cat((torch.stack((16 * scales, torch.zeros_like(scales)), dim=-1), pairs))
        return cls(tiles, pairs.to(torch.bfloat16).contiguous(), scale, zero, shape, group)

    @property
    def planes(self) -> int:
        """1 for int4, 2 for int8."""
        return self.values.shape[1] // self.shape[1]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Like `Packed.dequantized`, from the scales in their own dtype."""
        values = torch.cat((self.values & 15, self.values >> 4), dim=-1)  # [N / 64, planes * K, 64]
        default = INT4_ZERO
        if self.planes == 2:
            high, low = values.chunk(2, dim=1)
            values, default = ((high << 4) | low) ^ 0x80, 0
            values = values.view(torch.int8)
        weight = values.transpose(1, 2).reshape(self.shape[0], -1, self.group).float()
        weight.sub_(default if self.zero is None else self.zero.float().unsqueeze(-1))
        return weight.mul_(self.scale.float().unsqueeze(-1)).view(self.shape).to(dtype)


def rows_of_tiles(values: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Some rows of a weight whose values are in tiles, in the order of `Packed`: for embeddings that share it."""
    found = values[rows // TILE, :, rows % (TILE // 2)]  # [n, planes * K]
    halves = torch.where((rows % TILE >= TILE // 2)[:, None], found >> 4, found & 15)
    if halves.shape[1] == columns:
        return pack_nibbles(halves)
    return (((halves[:, :columns] << 4) | halves[:, columns:]) ^ 0x80).view(torch.int8)


def takes_tiles(weight: Packed) -> bool:
    """Whether this weight can be put in tiles on this machine."""
    rows, columns = weight.shape
    fits = weight.group in GROUPS and columns % weight.group == 0 and rows % TILE == 0 and weight.block == 1
    whole = weight.kind == "int8" and weight.group >= columns  # int8 products are faster
    own = weight.kind in ("int4", "int8") and weight.experts is None and weight.device.type == "cpu"
    return own and fits and not whole and rows > 0 and _has_tiles()


def _has_tiles() -> bool:
    """Whether torch has the kernel, and its tiles have the order that is read here, as with AVX-512."""
    values = (torch.arange(TILE * 32, dtype=torch.int32) * 7 // 3 % 16).view(TILE, 32)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        torch.ops.aten._weight_int4pack_mm_for_cpu(
            torch.zeros(1, 32, dtype=torch.bfloat16), packed, 32, torch.zeros(1, TILE, 2, dtype=torch.bfloat16)
        )
    except (AttributeError, RuntimeError):
        return False
    tiles = packed.view(32, TILE // 2)
    return torch.equal(torch.cat((tiles & 15, tiles >> 4), dim=1).t().to(torch.int32), values)


def tiles_linear(x: Tensor, weight: TiledWeight) -> Tensor:
    """x @ weight.T. x: [M, K] → [M, N], in bf16 if rows are few, else in the dtype of x."""
    planes = weight.planes
    if len(x) > MOST_ROWS[planes]:
        return F.linear(x, weight.dequantized(x.dtype))
    rows = x.to(torch.bfloat16)
    rows = rows.contiguous() if planes == 1 else torch.cat((rows, rows), dim=1)
    values = weight.values.view(weight.shape[0], -1)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, values, weight.group, weight.pairs)
    return y
