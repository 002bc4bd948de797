"""Unpacks the block formats of GGUF (Q4_0, Q6_K, ...), where each row consists of blocks with their own scales.

Each reader takes bytes [N, blocks, bytes of a block] and returns values [N, groups, columns of a group] with a scale
and, if blocks have a minimum, the lowest number of each group [N, groups, 1]: w = values * scale + lowest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.kernels.packed import Packed, pack_nibbles
from outpace.loading.stored import StoredWeight
from outpace.loading.weights import Source, stored_bytes
from outpace.quant.scheme import Scheme
from outpace.quant.stored import scheme_of

Groups = tuple[Tensor, Tensor, Tensor | None]
"""values, scale, lowest."""


@dataclass(frozen=True)
class Layout:
    """One block format."""

    size: int
    """Bytes of a block."""
    read: Callable[[Tensor], Groups]
    nibbles: bool = False
    """4-bit values, where 8 means 0 if there is no minimum; False: signed 8-bit values."""
    own_scale: bool = True
    """The file stores each group's scale in float16; False: it is a product of two numbers."""


@dataclass(frozen=True, eq=False)
class GGUFWeight(StoredWeight):
    """A quantized matrix of a GGUF file."""

    where: str
    """Its name in errors."""
    kind: str
    shape: tuple[int, int]
    sources: Mapping[str, Source]
    heads: int
    """Number of heads whose rows are stored as interleaved rope pairs; 0: rows are in order."""
    dequantized: Callable[[], Tensor]

    @property
    def label(self) -> str:
        return f"GGUF {self.kind}"

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.sources)

    def __call__(self) -> Tensor:
        return self.dequantized()

    def scheme(self, dtype: torch.dtype) -> Scheme | str:
        # A scale that is a product of two numbers is exact in float32. Rounded to float16 it is still more exact than
        # a weight that is rounded to 16 bits.
        if self.kind not in LAYOUTS:
            return "no scheme supports such numbers"
        raw = torch.empty(self.sources[""].shape, dtype=torch.uint8, device="meta")
        scales = torch.float32 if dtype == torch.float32 else torch.float16
        return scheme_of(self._packed(raw, scales)) or "its groups have too few columns"

    def packed(self, tensors: Mapping[str, Tensor], scales: torch.dtype) -> Packed:
        made = self._packed(tensors[""], scales)
        if not all(bool(part.isfinite().all()) for part in (made.scale, made.zero) if part is not None):
            raise ModelError(f"{self.where}: holds values that are not finite; use another file")
        return made

    def _packed(self, raw: Tensor, scales: torch.dtype) -> Packed:
        layout = LAYOUTS[self.kind]
        if self.heads:
            pairs = raw.view(self.heads, self.shape[0] // self.heads // 2, 2, raw.shape[1])
            raw = pairs.transpose(1, 2).reshape(raw.shape)
        values, scale, lowest = layout.read(raw.unflatten(1, (-1, layout.size)))
        zero = None
        if lowest is not None:
            values, scale, zero = _with_zero(values, scale, lowest, scales)
        scale = scale.half() if layout.own_scale and zero is None else scale.to(scales)
        columns = values.shape[2]
        flat = pack_nibbles(values.flatten(1)) if layout.nibbles else values.flatten(1).to(torch.int8)
        return Packed(flat, scale.squeeze(2), None if zero is None else zero.squeeze(2), self.shape, columns)


def _with_zero(values: Tensor, scale: Tensor, lowest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rewrite as (values - zero) * scale. A group whose zero would overflow becomes constant: its lowest number."""
    zero = -lowest / scale
    constant = (scale == 0) | (zero.abs() > torch.finfo(dtype).max / 2)
    zero, scale = torch.where(constant, -1.0, zero), torch.where(constant, lowest, scale)
    return values.masked_fill(constant, 0), scale.to(dtype), zero.to(dtype)


def _half(raw: Tensor, start: int) -> Tensor:
    """The float16 at this byte of each block, as float32 [N, B, 1]."""
    return raw[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, width: int) -> Tensor:
    """Nibbles of bytes [N, B, n]: for each `width` bytes the low halves, then the high halves: [N, B, 2 n]."""
    parts = raw.unflatten(2, (-1, 1, width))
    return torch.cat((parts & 15, parts >> 4), dim=3).flatten(2)


def _bits(raw: Tensor, count: int) -> Tensor:
    """The lowest `count` bits of bytes [N, B, n], one plane for each bit: [N, B, count, n]."""
    return torch.stack([(raw >> bit) & 1 for bit in range(count)], dim=2)


def _fifth(raw: Tensor) -> Tensor:
    """Four bytes of each block as the fifth bits of its 32 numbers."""
    return _bits(raw, 8).transpose(2, 3).flatten(2) << 4


def _q5_0(raw: Tensor) -> Groups:
    values = _nibbles(raw[..., 6:], 16) | _fifth(raw[..., 2:6])
    return values.view(torch.int8) - 16, _half(raw, 0), None


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and lowest number of the 8 groups in each block: [N, 8 B, 1]."""
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2).float() * _half(raw, 0)
    lowest = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2).float() * -_half(raw, 2)
    return scale.flatten(1).unsqueeze(2), lowest.flatten(1).unsqueeze(2)


def _q5_k(raw: Tensor) -> Groups:
    values = _nibbles(raw[..., 48:], 32) | _bits(raw[..., 16:48], 8).flatten(2) << 4
    return values.reshape(len(raw), -1, 32), *_k_scales(raw)


def _q6_k(raw: Tensor) -> Groups:
    low = _nibbles(raw[..., :128], 64)
    pairs = raw[..., 128:192].unflatten(2, (2, 1, 32))
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(2) << 4
    scale = raw[..., 192:208].contiguous().view(torch.int8).float() * _half(raw, 208)
    values = (low | high).view(torch.int8) - 32
    return values.reshape(len(raw), -1, 16), scale.flatten(1).unsqueeze(2), None


LAYOUTS: Mapping[str, Layout] = {
    "Q8_0": Layout(34, lambda raw: (raw[..., 2:].contiguous().view(torch.int8), _half(raw, 0), None)),
    "Q4_0": Layout(18, lambda raw: (_nibbles(raw[..., 2:], 16), _half(raw, 0), None), nibbles=True),
    "Q4_1": Layout(20, lambda raw: (_nibbles(raw[..., 4:], 16), _half(raw, 0), _half(raw, 2)), nibbles=True),
    "Q5_0": Layout(22, _q5_0),
    "Q5_1": Layout(24, lambda raw: (_nibbles(raw[..., 8:], 16) | _fifth(raw[..., 4:8]), _half(raw, 0), _half(raw, 2))),
    "Q4_K": Layout(
        144,
        lambda raw: (_nibbles(raw[..., 16:], 32).reshape(len(raw), -1, 32), *_k_scales(raw)),
        nibbles=True,
        own_scale=False,
    ),
    "Q5_K": Layout(176, _q5_k, own_scale=False),
    "Q6_K": Layout(210, _q6_k, own_scale=False),
}
"""Block formats that a scheme can hold without conversion."""
