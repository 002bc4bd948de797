"""Activations quantized per token: int8 or fp8 values, and one scale for each row.

The norm and activation kernels can write such rows themselves (`scales=`), without rows of 16 bits in between.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from ctypes import c_float
from types import MappingProxyType

import torch
from torch import Tensor

from outpace.kernels.packed import KINDS
from outpace.kernels.triton_stub import tl, triton

LARGEST: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
"""8-bit dtype -> its largest number, which the largest number of a row, or of a cached vector, becomes."""
SMALLEST = 2.0**-120  # the smallest scale: its reciprocal is finite


def empty_rows(rows: int, width: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for quantized rows: values [T, K] of "int8" or "fp8", scales float32 [T, 1]."""
    assert kind in ("int8", "fp8"), f"activations are quantized to int8 or fp8, not to {kind!r}"
    values = torch.empty((rows, width), dtype=KINDS[kind], device=device)
    return values, torch.empty((rows, 1), device=device)


def write_rows(y: Tensor, out: Tensor | None, scales: Tensor | None) -> Tensor:
    """y in `out` or, without it, y itself; with scales [T, 1], quantized in `out`, which holds int8 or fp8."""
    if scales is not None:
        assert out is not None, "scales go with an out of int8 or fp8"
        return quantize_into(y, out, scales)
    return y if out is None else out.copy_(y)


def quantize_into(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Writes x [T, K] as values and scales; returns the values. A row of zeros has the scale 1."""
    check_row_scales(x.shape, values, scales)
    if len(x) == 1 and x.numel() and values.dtype == torch.int8 and not x.is_cuda:
        return _quantize_one(x, values, scales)
    size = x.float().abs().amax(dim=1, keepdim=True) if x.numel() else scales.new_zeros(scales.shape)
    limit = LARGEST[values.dtype]
    # divided by a tensor: for a number, a GPU would multiply by its reciprocal
    scale = (size / torch.full_like(size, limit)).clamp(min=SMALLEST).masked_fill(size == 0, 1.0)
    y = x.float() * scale.reciprocal()
    scales.copy_(scale)
    if values.dtype == torch.int8:
        return values.copy_(y.round_())  # an error of a few units in the last place does not make 127 a 128
    return values.copy_(y.clamp_(-limit, limit))


def _quantize_one(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """One row on a CPU, with the same bits: the scale is a Python float, which saves 12 us of tiny tensors."""
    size = x.float().abs().max().item()
    scale = c_float(size / LARGEST[torch.int8]).value  # a double that is rounded to float32 is a float32 division
    if scale < SMALLEST:
        scale = 1.0 if size == 0 else SMALLEST
    scales.fill_(scale)
    return values.copy_((x.float() * c_float(1 / scale).value).round_())


def quantize_rows_torch(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """x [T, K] → values of the kind and scales [T, 1] with x ≈ values * scales."""
    values, scales = empty_rows(x.shape[0], x.shape[1], kind, x.device)
    return quantize_into(x, values, scales), scales


def check_row_scales(shape: torch.Size, values: Tensor, scales: Tensor) -> None:
    """Assert that values and scales can be written instead of rows of this shape."""
    assert len(shape) == 2, f"rows of shape {tuple(shape)} have no scale each"
    assert values.dtype in LARGEST, f"values of {values.dtype}: neither int8 nor float8_e4m3fn"
    assert values.shape == shape, (values.shape, shape)
    assert (scales.shape, scales.dtype) == ((shape[0], 1), torch.float32), (scales.shape, scales.dtype)
    assert scales.is_contiguous(), "scales must be contiguous"


@triton.jit
def quantize_tile(y: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """(values, still in fp32, scales [R]) of whole rows y [R, K], zero beyond their width."""
    size = tl.max(tl.abs(y), axis=1)
    scale = tl.maximum(tl.div_rn(size, tl.full(size.shape, largest, tl.float32)), 7.52316384526264e-37)
    scale = tl.where(size == 0, 1.0, scale)
    y *= tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    if largest == 127.0:
        y = (y + 12582912.0) - 12582912.0  # to the nearest even whole number
    return tl.minimum(tl.maximum(y, -largest), largest), scale


@triton.jit
def _quantize_rows_kernel(
    x_ptr: tl.tensor, values_ptr: tl.tensor, scales_ptr: tl.tensor, width: tl.tensor, x_stride: tl.tensor,
    values_stride: tl.tensor,
    largest: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, block)[None, :]
    x = tl.load(x_ptr + row * x_stride + col, mask=col < width, other=0.0).to(tl.float32)
    y, scale = quantize_tile(x, largest)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    tl.store(values_ptr + row * values_stride + col, y.to(values_ptr.dtype.element_ty), mask=col < width)


def whole_row(width: int) -> dict[str, int]:
    """The tile of a kernel that holds a whole row."""
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(16, max(1, block // 512))}


def quantize_rows_triton(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """quantize_rows_torch in one kernel."""
    values, scales = empty_rows(x.shape[0], x.shape[1], kind, x.device)
    assert x.shape[1] <= 65536, f"rows of {x.shape[1]} are wider than a program"
    assert x.stride(1) == 1 or x.shape[1] == 1, "rows must be contiguous"
    if x.numel():
        _quantize_rows_kernel[(len(x),)](
            *(x, values, scales, x.shape[1], x.stride(0), values.stride(0)),
            largest=LARGEST[values.dtype],
            **whole_row(x.shape[1]),
        )
    return values, scales
