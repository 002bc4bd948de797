"""Activations: the gated product of two halves of a row, and an activation after a bias."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.errors import NotSupported
from outpace.kernels.launch_options import few_overlap, pdl_options
from outpace.kernels.quantize import LARGEST, check_row_scales, quantize_tile, whole_row, write_rows
from outpace.kernels.triton_stub import tl, triton

# Name of an activation (in Hugging Face's ACT2FN, or our own) → the kind that computes it.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
        "sigmoid": "sigmoid",
    }
)

_TORCH: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": torch.relu,
        "relu2": lambda x: torch.relu(x).square(),
        "sigmoid": torch.sigmoid,
    }
)


def activation_kind(name: str) -> str:
    """The kind that computes the activation of this name."""
    if name not in ACTIVATIONS:
        raise NotSupported(f"activation {name!r} has no kernel; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def gated_act_torch(x: Tensor, kind: str, *, out: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """act(gate) * up of x: [T, 2I] → [T, I], gate columns first.

    With scales [T, 1] the result is written quantized: out holds int8 or fp8 (see quantize.py).
    """
    gate, up = x.chunk(2, dim=1)
    y = (_TORCH[activation_kind(kind)](gate.float()) * up.float()).to(x.dtype)
    return write_rows(y, out, scales)


def bias_act_torch(
    x: Tensor, bias: Tensor | None, kind: str, *, out: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """act(x + bias). x: [T, I], bias: [I]; scales: as gated_act_torch."""
    x32 = x.float() if bias is None else x.float() + bias.float()
    y = _TORCH[activation_kind(kind)](x32).to(x.dtype)
    return write_rows(y, out, scales)


@triton.jit
def activate(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The activation of this kind, in fp32."""
    if kind == "silu":
        y = x * tl.sigmoid(x)
    elif kind == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == "gelu_tanh":  # 0.5 * (1 + tanh(u)) = sigmoid(2u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif kind == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif kind == "relu":
        y = tl.where(x < 0, 0.0, x)  # keeps NaN, which maximum() drops
    elif kind == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(kind == "sigmoid", "unknown activation")
        y = tl.sigmoid(x)
    return y


@triton.jit
def activate_gated(
    gate: tl.tensor, up: tl.tensor, kind: tl.constexpr, limit: tl.constexpr, alpha: tl.constexpr
) -> tl.tensor:
    """act(gate) * up, or with a limit GPT-OSS's (clamp(up) + 1) * gate * sigmoid(alpha * gate), in fp32."""
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)  # keeps NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = (up + 1.0) * (gate * tl.sigmoid(alpha * gate))
    else:
        y = activate(gate, kind) * up
    return y


@triton.jit
def _quantized(
    y: tl.tensor, mask: tl.tensor, scales_ptr: tl.tensor, row: tl.tensor, dtype: tl.constexpr, largest: tl.constexpr
) -> tl.tensor:
    """y unchanged; with scales: y rounded to dtype and quantized, its scale stored. A tile is then a whole row."""
    if scales_ptr is not None:
        whole, scale = quantize_tile(tl.where(mask, y, 0.0).to(dtype).to(tl.float32)[None, :], largest)
        tl.store(scales_ptr + row + tl.arange(0, 1), scale)
        y = tl.reshape(whole, y.shape)
    return y


@triton.jit
def _gated_act_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, scales_ptr: tl.tensor, width: tl.tensor, x_stride: tl.tensor,
    out_stride: tl.tensor,
    kind: tl.constexpr, largest: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)  # [I]
    mask = col < width
    gate_ptr = x_ptr + row * x_stride + col
    up_ptr = gate_ptr + width
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, kind) * up
    y = _quantized(y, mask, scales_ptr, row, x_ptr.dtype.element_ty, largest)
    tl.store(out_ptr + row * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bias_act_kernel(
    x_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, scales_ptr: tl.tensor, width: tl.tensor,
    x_stride: tl.tensor, out_stride: tl.tensor,
    kind: tl.constexpr, largest: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * block + tl.arange(0, block)  # [I]
    mask = col < width
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    y = activate(x, kind)
    y = _quantized(y, mask, scales_ptr, row, x_ptr.dtype.element_ty, largest)
    tl.store(out_ptr + row * out_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)


def act_config(width: int) -> dict[str, int]:
    """Tile of the element-wise kernels: one row, up to 1024 columns."""
    return {"block": min(1024, triton.next_power_of_2(width)), "num_warps": 4}


def _check(x: Tensor, out: Tensor | None, width: int, scales: Tensor | None) -> Tensor:
    if scales is not None:
        assert out is not None, "scales go with an out of int8 or fp8"
        assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
        check_row_scales(torch.Size((x.shape[0], width)), out, scales)
        return out
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    assert (out.shape, out.dtype) == ((x.shape[0], width), x.dtype)
    return out


def gated_act_triton(
    x: Tensor,
    kind: str,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """gated_act_torch in one kernel."""
    kind = activation_kind(kind)
    assert x.shape[1] % 2 == 0, f"{x.shape[1]} columns cannot be halved"
    width = x.shape[1] // 2
    out = _check(x, out, width, scales)
    if out.numel() == 0:
        return out
    meta = {**(act_config(width) if scales is None else whole_row(width)), **(config or {})}
    grid = (x.shape[0], triton.cdiv(width, meta["block"]))
    largest = None if scales is None else LARGEST[out.dtype]
    _gated_act_kernel[grid](
        *(x, out, scales, width, x.stride(0), out.stride(0)),
        kind=kind,
        largest=largest,
        **meta,
        **pdl_options(few_overlap(len(x), x)),
    )
    return out


def bias_act_triton(
    x: Tensor,
    bias: Tensor | None,
    kind: str,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """bias_act_torch in one kernel; out may be x."""
    kind = activation_kind(kind)
    width = x.shape[1]
    out = _check(x, out, width, scales)
    assert bias is None or (bias.shape == (width,) and bias.is_contiguous())
    if out.numel() == 0:
        return out
    meta = {**(act_config(width) if scales is None else whole_row(width)), **(config or {})}
    grid = (x.shape[0], triton.cdiv(width, meta["block"]))
    largest = None if scales is None else LARGEST[out.dtype]
    _bias_act_kernel[grid](
        *(x, bias, out, scales, width, x.stride(0), out.stride(0)),
        kind=kind,
        largest=largest,
        **meta,
        **pdl_options(few_overlap(len(x), x)),
    )
    return out
