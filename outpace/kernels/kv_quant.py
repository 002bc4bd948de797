"""Keys and values of 8 bits in pages: how vectors are quantized, and how the torch paths read them back.

A vector is a key or a value of one token and one KV head. It has one float32 scale: absmax / 127 for int8, absmax / 448
for fp8 (e4m3). The scales of a layer are one tensor [N, 2, Hkv, bs] next to the pages [N, bs, Hkv, D]: keys' scales at
0, values' at 1. The scales of one head and page are contiguous, as the attention kernels read them, and a page's scales
are one piece of memory, so that a page can move.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.quantize import LARGEST
from outpace.kernels.triton_stub import NATIVE, tl, triton

SMALLEST = tl.constexpr(2.0**-126)  # a smaller scale loses bits, or is 0: the vector is stored as zeros with scale 1
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: added to a float32 below 2**22, it rounds away the fraction

FP8_PAIRS = tl.constexpr("""{
.reg .b32 both;
.reg .b16 low, high;
prmt.b32 both, $2, 0, 0x3120;
mov.b32 {low, high}, both;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
INT8_PAIRS = tl.constexpr("""{
.reg .b32 bytes, part, base;
mov.b32 base, 0xe480e480;
xor.b32 bytes, $2, 0x80808080;
prmt.b32 part, bytes, 0x64646464, 0x4240;
add.rn.f16x2 $0, part, base;
prmt.b32 part, bytes, 0x64646464, 0x4341;
add.rn.f16x2 $1, part, base;
}""")
INT8_IN_ROWS = tl.constexpr("""{
.reg .b32 bytes, part, base;
mov.b32 base, 0xe480e480;
xor.b32 bytes, $2, 0x80808080;
prmt.b32 part, bytes, 0x64646464, 0x4140;
add.rn.f16x2 $0, part, base;
prmt.b32 part, bytes, 0x64646464, 0x4342;
add.rn.f16x2 $1, part, base;
}""")
"""The first two make two words of two values each in fp16: of the low bytes, and of the high ones; the third makes four
values in order. int8 values become 1024 + 128 + v first."""


@triton.jit
def as_numbers(stored: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """int8 or fp8 values in fp16 or fp32, which hold them exactly."""
    if NATIVE and stored.dtype == tl.int8 and dtype == tl.float16:
        numbers = tl.inline_asm_elementwise(INT8_IN_ROWS, "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4)
    else:
        numbers = stored.to(dtype)
    return numbers


@triton.jit
def two_values(pairs: tl.tensor, whole: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """int16 that hold two values each → the low and the high ones in dtype. `whole`: they are int8, else fp8.

    Values are read in pairs because matrix units take columns of them, and only units of 16 bits can be transposed.
    """
    if NATIVE and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            INT8_PAIRS if whole else FP8_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        kind: tl.constexpr = tl.int8 if whole else tl.float8e4nv
        low = (pairs & 0xFF).to(tl.uint8).to(kind, bitcast=True).to(dtype)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(kind, bitcast=True).to(dtype)
    return low, high


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors [..., D] as numbers of `dtype` and float32 scales [...], rounded to the nearest, ties to even."""
    x = x.float()
    scale = x.abs().amax(-1) / LARGEST[dtype]
    scale = torch.where(scale < SMALLEST.value, 1.0, scale)
    x = x / scale[..., None]
    return (x.round() if dtype == torch.int8 else x).to(dtype), scale


def write_tokens(x: Tensor, pages: Tensor, page: Tensor, offset: Tensor, scales: Tensor | None = None) -> None:
    """Write x [T, Hkv, D] to places (page, offset) of pages [N, bs, Hkv, D]; `scales` [N, Hkv, bs]: quantized."""
    if scales is None:
        pages[page, offset] = x
        return
    values, scale = quantize_heads(x, pages.dtype)
    pages.view(torch.int8)[page, offset] = values.view(torch.int8)  # torch cannot index fp8
    scales[page, :, offset] = scale


def check_page_scales(k_pages: Tensor, v_pages: Tensor, scales: Tensor) -> None:
    """Raise for scales that do not belong to these pages: the kernels do not check shapes and strides."""
    num_blocks, size, heads, _ = k_pages.shape
    if k_pages.dtype not in LARGEST or v_pages.dtype != k_pages.dtype:
        raise ValueError(f"scales belong to pages of int8 or fp8: k_pages {k_pages.dtype}, v_pages {v_pages.dtype}")
    inside = (heads * size, size, 1)
    if scales.shape != (num_blocks, 2, heads, size) or scales.dtype != torch.float32 or scales.stride()[1:] != inside:
        raise ValueError(f"scales {scales.dtype} {tuple(scales.shape)} do not fit k_pages {tuple(k_pages.shape)}")


@dataclass(frozen=True, slots=True)
class Stored:
    """The keys, or the values, of a layer, as the torch paths read them."""

    pages: Tensor
    """[N, bs, Hkv, D]"""
    scales: Tensor | None = None
    """[N, Hkv, bs] where the pages are quantized."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the pages."""
        return self.pages.shape

    def blocks(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of these pages in `dtype`: [n, bs, Hkv, D]."""
        if self.scales is None:
            return self.pages.index_select(0, ids).to(dtype)
        found = self.pages.view(torch.int8).index_select(0, ids).view(self.pages.dtype).to(dtype)
        return found.mul_(self.scales.index_select(0, ids).transpose(1, 2)[..., None])

    def run(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """`blocks`, read-only: without a copy where the pages are adjacent."""
        numbers = ids.tolist()
        first = numbers[0]
        if self.scales is not None or self.pages.dtype != dtype or numbers != list(range(first, first + len(numbers))):
            return self.blocks(ids.long(), dtype)
        return self.pages[first : first + len(numbers)]

    def tokens(self, page: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """The vectors at (page, offset) [n, L], in `dtype`: [n, Hkv, L, D]."""
        _, size, heads, dim = self.shape
        head = torch.arange(heads, device=self.pages.device)[:, None]  # [Hkv, 1]
        pages = self.pages if self.scales is None else self.pages.view(torch.int8)
        if pages.is_contiguous():
            rows = ((page * size + offset) * heads)[:, None] + head  # [n, Hkv, L]
            found = pages.view(-1, dim).index_select(0, rows.flatten()).view(*rows.shape, dim)
        else:
            found = pages[page[:, None], offset[:, None], head]
        found = found.view(self.pages.dtype).to(dtype)
        return found if self.scales is None else found.mul_(self.scales[page[:, None], head, offset[:, None], None])


def stored(k_pages: Tensor, v_pages: Tensor, scales: Tensor | None) -> tuple[Stored, Stored]:
    """Keys and values of a layer."""
    if scales is None:
        return Stored(k_pages), Stored(v_pages)
    return Stored(k_pages, scales[:, 0]), Stored(v_pages, scales[:, 1])


@triton.jit
def scale_of(largest: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The scales of vectors whose largest magnitudes are `largest` (float32)."""
    limit: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    scale = tl.div_rn(largest, tl.full(largest.shape, limit, tl.float32))
    return tl.where(scale < SMALLEST, 1.0, scale)


@triton.jit
def quantize(x: tl.tensor, scale: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x / scale, both float32 and of one shape, as numbers of `dtype`: the same as `quantize_heads`."""
    x = tl.div_rn(x, scale)
    if dtype == tl.int8:
        x = (x + ROUNDER) - ROUNDER
    return x.to(dtype)
