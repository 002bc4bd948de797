"""Quantized tensors of a GGUF file: blocks of bytes along each row, every block with scales of its own.

Each reader takes bytes [N, blocks, size of a block] and gives values [N, groups, columns of a group] with a scale and,
where a block has a minimum, the lowest number of each group [N, groups, 1]: w = values * scale + lowest.
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
    """One type of blocks."""

    size: int
    """Bytes of a block."""
    columns: int
    """Of a block."""
    read: Callable[[Tensor], Groups]
    half: bool = False
    """Values of 4 bits, with 8 for 0 where there is no minimum; else they are signed ones of 8."""
    own_scale: bool = True
    """The scale of a group is a number of the file, in float16, and not a product of two."""


@dataclass(frozen=True, eq=False)
class GGUFWeight(StoredWeight):
    """A quantized matrix of a GGUF file."""

    where: str
    """What errors call it."""
    kind: str
    shape: tuple[int, int]
    sources: Mapping[str, Source]
    heads: int
    """Whose rows are stored as pairs that rope turns; 0: rows are in order."""
    dequantized: Callable[[], Tensor]

    @property
    def label(self) -> str:
        """See `StoredWeight`."""
        return f"GGUF {self.kind}"

    @property
    def nbytes(self) -> int:
        """See `StoredWeight`."""
        return stored_bytes(self.sources)

    def __call__(self) -> Tensor:
        """See `StoredWeight`."""
        return self.dequantized()

    def scheme(self, dtype: torch.dtype) -> Scheme | str:
        """See `StoredWeight`.

        A scale that is a product of two numbers is exact in float32. Rounded to float16 it is nearer than a weight that
        is rounded to 16 bits.
        """
        if self.kind not in LAYOUTS:
            return "no scheme has such numbers"
        raw = torch.empty(self.sources[""].shape, dtype=torch.uint8, device="meta")
        scales = torch.float32 if dtype == torch.float32 else torch.float16
        return scheme_of(self._packed(raw, scales)) or "its groups have too few columns"

    def packed(self, tensors: Mapping[str, Tensor], scales: torch.dtype) -> Packed:
        """See `StoredWeight`."""
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
        flat = pack_nibbles(values.flatten(1)) if layout.half else values.flatten(1).to(torch.int8)
        return Packed(flat, scale.squeeze(2), None if zero is None else zero.squeeze(2), self.shape, columns)


def _with_zero(values: Tensor, scale: Tensor, lowest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(values - zero) * scale; a group whose steps are too small for a zero in dtype is its lowest number."""
    zero = -lowest / scale
    constant = (scale == 0) | (zero.abs() > torch.finfo(dtype).max / 2)
    zero, scale = torch.where(constant, -1.0, zero), torch.where(constant, lowest, scale)
    return values.masked_fill(constant, 0), scale.to(dtype), zero.to(dtype)


def _half(raw: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block [N, B, 1], as float32."""
    return raw[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, width: int) -> Tensor:
    """Bytes [N, B, n]: the low halves of `width` of them, then the high ones, and so on: [N, B, 2 n]."""
    parts = raw.unflatten(2, (-1, 1, width))
    return torch.cat((parts & 15, parts >> 4), dim=3).flatten(2)


def _bits(raw: Tensor, count: int) -> Tensor:
    """The lowest bits of bytes [N, B, n], each set of bits after the other: [N, B, count, n]."""
    return torch.stack([(raw >> bit) & 1 for bit in range(count)], dim=2)


def _q8_0(raw: Tensor) -> Groups:
    return raw[..., 2:].contiguous().view(torch.int8), _half(raw, 0), None


def _q4_0(raw: Tensor) -> Groups:
    return _nibbles(raw[..., 2:], 16), _half(raw, 0), None


def _q4_1(raw: Tensor) -> Groups:
    return _nibbles(raw[..., 4:], 16), _half(raw, 0), _half(raw, 2)


def _fifth(raw: Tensor) -> Tensor:
    """Four bytes of each block as the fifth bits of its 32 numbers."""
    return _bits(raw, 8).transpose(2, 3).flatten(2) << 4


def _q5_0(raw: Tensor) -> Groups:
    values = _nibbles(raw[..., 6:], 16) | _fifth(raw[..., 2:6])
    return values.view(torch.int8) - 16, _half(raw, 0), None


def _q5_1(raw: Tensor) -> Groups:
    return _nibbles(raw[..., 8:], 16) | _fifth(raw[..., 4:8]), _half(raw, 0), _half(raw, 2)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and lowest number of the 8 groups of a block: [N, 8 B, 1]."""
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2).float() * _half(raw, 0)
    lowest = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2).float() * -_half(raw, 2)
    return scale.flatten(1).unsqueeze(2), lowest.flatten(1).unsqueeze(2)


def _q4_k(raw: Tensor) -> Groups:
    return _nibbles(raw[..., 16:], 32).reshape(len(raw), -1, 32), *_k_scales(raw)


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
    "Q8_0": Layout(34, 32, _q8_0),
    "Q4_0": Layout(18, 32, _q4_0, half=True),
    "Q4_1": Layout(20, 32, _q4_1, half=True),
    "Q5_0": Layout(22, 32, _q5_0),
    "Q5_1": Layout(24, 32, _q5_1),
    "Q4_K": Layout(144, 256, _q4_k, half=True, own_scale=False),
    "Q5_K": Layout(176, 256, _q5_k, own_scale=False),
    "Q6_K": Layout(210, 256, _q6_k, own_scale=False),
}
"""Types of blocks whose numbers a scheme holds."""
