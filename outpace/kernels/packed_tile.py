"""One step of a product of tiles with a quantized weight: what linear layers and experts share on the device.

The values become numbers of x's dtype in registers, which is exact for values of 4 and 8 bits (a zero that is no whole
number is rounded with them), and are multiplied by matrix units. Two values share a byte of int4: the low halves are
the even columns and the high ones the odd columns, so that there is a product of each with its half of x.
"""
# mypy: disallow-untyped-decorators=False

from outpace.kernels.packed import Packed
from outpace.kernels.triton_stub import tl, triton

ROW, STEP, EACH = "row", "step", "each"
"""Where scales are applied: after all steps, after each of them, or to each weight before the product."""


def scale_form(weight: Packed, block_k: int) -> str:
    """Where the scales of a weight are applied with steps of this depth."""
    if weight.group >= weight.shape[1]:
        return ROW
    return STEP if weight.group % block_k == 0 else EACH


def step_depth(weight: Packed, block_k: int) -> int:
    """The depth of a step up to block_k, within one group if steps of 32 or more can be."""
    part = weight.group & -weight.group  # the power of two in it
    return block_k if weight.group >= weight.shape[1] or part < 32 else min(part, block_k)


@triton.jit
def _numbers(
    stored: tl.tensor,  # [N, K], or int4: bytes [N, K / 2]
    high: tl.constexpr,
    scale: tl.tensor,  # of each weight, or None
    zero: tl.tensor,  # that broadcasts to stored, or None
    dtype: tl.constexpr,
) -> tl.tensor:
    """(values - zero) * scale in dtype; of bytes of int4 those of the high or the low halves."""
    half: tl.constexpr = stored.dtype == tl.uint8
    if half:
        stored = stored >> 4 if high else stored & 15
    if zero is not None:
        w = stored.to(tl.float32) - zero
    elif half:
        w = stored.to(tl.int8) - 8
    else:
        w = stored
    if scale is not None:
        w = w.to(tl.float32) * scale
    return w.to(dtype)


@triton.jit
def _load_scale(
    ptrs: tl.tensor, column: tl.tensor, depth: tl.tensor, group: tl.constexpr, form: tl.constexpr
) -> tl.tensor:
    """Scales or zeros [N, 1] or [N, K] of these columns ([1, 1] or [1, K]), in fp32."""
    if form == "step":
        scale = tl.load(ptrs + column // group)
    else:
        scale = tl.load(ptrs + column // group, mask=column < depth, other=0.0)
    return scale.to(tl.float32)


@triton.jit
def _half_step(
    acc: tl.tensor,  # [N, M]
    x: tl.tensor,  # [M, K]
    stored: tl.tensor,  # [N, K]
    high: tl.constexpr,
    scale_ptrs: tl.tensor,  # [N, 1]
    zero_ptrs: tl.tensor,  # [N, 1] or None
    row_zero: tl.tensor,  # [N, 1] or None
    column: tl.tensor,  # [1, K]
    depth: tl.tensor,
    group: tl.constexpr,
    form: tl.constexpr,
) -> tl.tensor:
    """acc + the product of these columns, with scale and zero where they differ along the row within the step."""
    scale = None
    zero = row_zero
    if form == "each":
        scale = _load_scale(scale_ptrs, column, depth, group, form)
        if zero_ptrs is not None:
            zero = _load_scale(zero_ptrs, column, depth, group, form)
    w = _numbers(stored, high, scale, zero, x.dtype)
    return tl.dot(w, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def packed_step(
    acc: tl.tensor,  # fp32 [N, M]
    x_ptrs: tl.tensor,  # [M, K]
    live: tl.tensor,  # [M, 1]
    values_ptrs: tl.tensor,  # [N, K] or [N, K / 2]
    scale_ptrs: tl.tensor,  # [N, 1]
    zero_ptrs: tl.tensor,  # [N, 1] or None
    row_zero: tl.tensor,  # [N, 1], the zero of the row, or None
    k: tl.tensor,
    depth: tl.tensor,
    group: tl.constexpr,
    form: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """acc + weight @ x.T of the tiles k columns on. With the form "row" acc has to be scaled after the last step."""
    block_m: tl.constexpr = x_ptrs.shape[0]
    block_k: tl.constexpr = x_ptrs.shape[1]
    half: tl.constexpr = values_ptrs.dtype.element_ty == tl.uint8
    byte = tl.arange(0, block_k // 2 if half else block_k)[None, :]
    first = k + (2 * byte if half else byte)  # the column of each byte
    if even:
        x = tl.load(x_ptrs + k, mask=live, other=0.0)
        stored = tl.load(values_ptrs + (k // 2 if half else k))
    else:
        x = tl.load(x_ptrs + k, mask=live & (k + tl.arange(0, block_k)[None, :] < depth), other=0.0)
        stored = tl.load(values_ptrs + (k // 2 if half else k), mask=first < depth, other=0.0)
    zero = row_zero
    total = acc
    if form == "step":
        total = tl.zeros_like(acc)
        if zero_ptrs is not None:
            zero = _load_scale(zero_ptrs, k, depth, group, form)
    if half:
        left, right = tl.split(tl.reshape(x, [block_m, block_k // 2, 2]))
        total = _half_step(total, left, stored, False, scale_ptrs, zero_ptrs, zero, first, depth, group, form)
        total = _half_step(total, right, stored, True, scale_ptrs, zero_ptrs, zero, first + 1, depth, group, form)
    else:
        total = _half_step(total, x, stored, False, scale_ptrs, zero_ptrs, zero, first, depth, group, form)
    if form == "step":
        total = acc + total * _load_scale(scale_ptrs, k, depth, group, form)
    return total
