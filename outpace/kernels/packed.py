"""The common form of quantized weights: values of 4 or 8 bits, a scale and a zero for every block of them.

w[n, k] = (values[n, k] - zero[n // block, k // group]) * scale[n // block, k // group], computed in float32. A stack of
experts is the same with one more dimension in front.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

KINDS: Mapping[str, torch.dtype] = MappingProxyType(
    {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
)
"""The dtype that holds values of each kind; a byte of int4 holds two."""
INT4_ZERO = 8  # the zero among 0..15 of a weight without zeros of its own


def pack_nibbles(values: Tensor) -> Tensor:
    """Integers 0..15 [..., K] → uint8 [..., ceil(K / 2)]: byte j has column 2j in its low half, 2j + 1 in its high."""
    if values.shape[-1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    values = values.to(torch.uint8)
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """uint8 [..., ceil(K / 2)] → uint8 [..., K]: the reverse of pack_nibbles."""
    wide = packed.to(torch.int16)
    pairs = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F)  # the low half is the byte that comes first
    return pairs.view(torch.uint8)[..., :columns]


def scale_shape(shape: tuple[int, int], group: int, block: int = 1) -> tuple[int, int]:
    """The scales of a weight [N, K]: one for `block` rows and `group` columns."""
    return -(-shape[0] // block), -(-shape[1] // group)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A quantized weight [N, K], or a stack [E, N, K] of them."""

    values: Tensor
    """int8 or float8_e4m3fn [N, K], or uint8 [N, ceil(K / 2)] of int4: unsigned, packed by pack_nibbles."""
    scale: Tensor
    """[ceil(N / block), ceil(K / group)], of any float dtype."""
    zero: Tensor | None
    """Shaped like scale, in units of the values; may be fractional. None: 0, for int4 INT4_ZERO."""
    shape: tuple[int, int]
    """(N, K) of one weight, without the experts."""
    group: int
    """Columns that share a scale; K: the whole row."""
    block: int = 1
    """Rows that share a scale; N: the whole tensor."""

    def __post_init__(self) -> None:
        assert self.values.dtype in KINDS.values(), f"values of {self.values.dtype}: not of {', '.join(KINDS)}"
        assert min(self.group, self.block) >= 1, f"group {self.group}, block {self.block}: both are at least 1"
        assert self.scale.is_floating_point(), f"scale of {self.scale.dtype}: it must be a float"
        assert self.zero is None or self.zero.is_floating_point(), "zero must be a float"
        assert self.values.dim() in (2, 3), f"values {tuple(self.values.shape)}: neither a weight nor a stack of them"
        stack, rows = self.values.shape[:-2], self.shape[0]
        stored = (*stack, rows, -(-self.shape[1] // 2) if self.kind == "int4" else self.shape[1])
        assert self.values.shape == stored, f"values {tuple(self.values.shape)} of {self.shape}: not {stored}"
        scales = (*stack, *scale_shape(self.shape, self.group, self.block))
        for name, tensor in (("scale", self.scale), ("zero", self.zero)):
            assert tensor is None or tensor.shape == scales, f"{name} {tuple(tensor.shape)}: not {scales}"
            assert tensor is None or tensor.device == self.values.device, f"{name} is on {tensor.device}"

    @classmethod
    def empty(
        cls,
        kind: str,
        shape: tuple[int, int],
        group: int,
        block: int = 1,
        *,
        experts: int | None = None,
        scale_dtype: torch.dtype = torch.float32,
        with_zero: bool = False,
        device: torch.device | str | None = None,
    ) -> Self:
        """Uninitialized memory for a weight of this kind, or for a stack of experts."""
        stack = () if experts is None else (experts,)
        columns = -(-shape[1] // 2) if kind == "int4" else shape[1]
        values = torch.empty((*stack, shape[0], columns), dtype=KINDS[kind], device=device)
        scale = torch.empty((*stack, *scale_shape(shape, group, block)), dtype=scale_dtype, device=device)
        return cls(values, scale, torch.empty_like(scale) if with_zero else None, shape, group, block)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return next(kind for kind, dtype in KINDS.items() if dtype == self.values.dtype)

    @property
    def experts(self) -> int | None:
        """The number of weights in a stack; None: it is a single weight."""
        return self.values.shape[0] if self.values.dim() == 3 else None

    @property
    def default_zero(self) -> int:
        """The zero of a weight that has none of its own."""
        return INT4_ZERO if self.kind == "int4" else 0

    @property
    def nbytes(self) -> int:
        """Bytes of values, scale and zero."""
        return sum(t.nbytes for t in (self.values, self.scale, self.zero) if t is not None)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.values.device

    def __getitem__(self, expert: int) -> Self:
        """One expert of a stack: a view."""
        assert self.experts is not None, "a single weight has no experts"
        zero = None if self.zero is None else self.zero[expert]
        return replace(self, values=self.values[expert], scale=self.scale[expert], zero=zero)

    def narrow(self, start: int, length: int) -> Self:
        """Rows start to start + length of the weight (of each expert): a view. It must not cut a block of rows."""
        rows, block = self.shape[0], self.block
        assert 0 <= start <= start + length <= rows, f"rows {start} to {start + length} of {rows}"
        if block < rows:
            whole = start % block == 0 and (length % block == 0 or start + length == rows)
            assert whole, f"rows {start} to {start + length} cut a block of {block} rows with one scale"
        first, count = start // block if block < rows else 0, scale_shape((length, self.shape[1]), self.group, block)[0]
        zero = None if self.zero is None else self.zero.narrow(-2, first, count)
        values, scale = self.values.narrow(-2, start, length), self.scale.narrow(-2, first, count)
        return replace(self, values=values, scale=scale, zero=zero, shape=(length, self.shape[1]))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers of dtype, [N, K] or [E, N, K], rounded once."""
        values = unpack_nibbles(self.values, self.shape[1]) if self.kind == "int4" else self.values
        weight = values.to(torch.float32, copy=True)
        whole = self.block == 1 and self.shape[1] % self.group == 0 and weight.numel() > 0
        shaped = weight.unflatten(-1, (-1, self.group)) if whole else weight  # a view
        if self.zero is not None:
            shaped.sub_(self._spread(self.zero, whole))
        elif self.default_zero:
            shaped.sub_(self.default_zero)
        shaped.mul_(self._spread(self.scale, whole))
        return weight.to(dtype)

    def _spread(self, per_block: Tensor, whole: bool) -> Tensor:
        """A number for each block → one for each weight, in float32; or, if `whole`, for each group [..., 1]."""
        if whole:
            return per_block.float().unsqueeze(-1)
        rows = per_block.float().repeat_interleave(min(self.block, max(1, self.shape[0])), dim=-2)
        return rows.repeat_interleave(min(self.group, max(1, self.shape[1])), dim=-1)[
            ..., : self.shape[0], : self.shape[1]
        ]
