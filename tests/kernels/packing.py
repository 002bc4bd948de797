"""Random quantized weights for the tests: any kind, group and block, among bytes that must not be read."""

import torch
from torch import Tensor

from outpace.kernels.packed import KINDS, Packed, pack_nibbles, scale_shape

SCALE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_packed(
    kind: str,
    shape: tuple[int, int],
    group: int,
    block: int = 1,
    *,
    experts: int | None = None,
    zero: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Packed:
    """A weight whose products have the size of what they multiply; rows of poison lie around its values and scales."""
    stack = () if experts is None else (experts,)
    if kind == "fp8":
        values = torch.randn(*stack, *shape).mul(60).clamp(-448, 448).to(KINDS[kind])
    elif kind == "int8":
        values = torch.randint(-127, 128, (*stack, *shape), dtype=torch.int8)
    else:
        values = pack_nibbles(torch.randint(0, 16, (*stack, *shape)))
    size = {"int8": 73, "int4": 4.6, "fp8": 60}[kind] * max(1, shape[1]) ** 0.5
    scales = (*stack, *scale_shape(shape, group, block))
    scale = (torch.rand(scales) + 0.5).div(size).to(scale_dtype)
    middle = 7.5 if kind == "int4" else 0.0
    offset = (middle + torch.rand(scales)).to(scale_dtype) if zero else None
    parts = [None if t is None else guarded(t.to(device)) for t in (values, scale, offset)]
    assert parts[0] is not None
    assert parts[1] is not None
    return Packed(parts[0], parts[1], parts[2], shape, group, block)


def guarded(values: Tensor, gap: int = 16) -> Tensor:
    """A copy whose rows lie `gap` numbers apart, among NaN, or in bytes that hold no NaN among their largest."""
    wide = torch.empty((*(n + 2 for n in values.shape[:-1]), values.shape[-1] + gap), dtype=values.dtype).to(
        values.device
    )
    wide.view(torch.uint8).fill_(0x7F)  # NaN of float8_e4m3fn
    if values.dtype in SCALE_TYPES:
        wide.fill_(float("nan"))
    for dim, size in enumerate(values.shape):
        wide = wide.narrow(dim, gap if dim == values.dim() - 1 else 1, size) if size else wide.narrow(dim, 0, 0)
    return wide.copy_(values)
