"""One step of a product of tiles with a quantized weight: device code that linear layers and experts share.

The values become numbers of x's dtype in registers, which is exact for values of 4 and 8 bits (with a fractional zero
they are rounded), and are multiplied by matrix units.
"""
# mypy: disallow-untyped-decorators=False

from outpace.kernels.packed import Packed
from outpace.kernels.triton_stub import NATIVE, tl, triton

INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 low, high, size, sign, one;
mov.b32 one, 0x3f803f80;
prmt.b32 low, $2, 0, 0x4140;
prmt.b32 high, $2, 0, 0x4342;
lop3.b32 size, low, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, low, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $0, size, one, sign;
lop3.b32 size, high, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, high, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $1, size, one, sign;
}""")
"""Four int8 values: the last 7 bits as the fraction of 128 + v, less 128, or 256 if the sign bit is set. torch's and
Triton's own conversions take a slow instruction for each value."""
INT4_TO_BF16 = tl.constexpr("""{
.reg .b32 first, second, part, one, zero;
mov.b32 one, 0x3f803f80;
mov.b32 zero, 0xc308c308;
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
lop3.b32 part, first, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, part, one, zero;
lop3.b32 part, second, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $1, part, one, zero;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 part, first, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $2, part, one, zero;
lop3.b32 part, second, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $3, part, one, zero;
}""")
"""Four bytes of int4 values: the low halves, then the high ones, each as the fraction of 128 + v, less 128 + 8."""

ROW, STEP, EACH = "row", "step", "each"
"""Where scales are applied: after all steps, after each of them, or to each weight before the product."""


def scale_form(weight: Packed, block_k: int) -> str:
    """Where the scales of a weight are applied with steps of this depth."""
    if weight.group >= weight.shape[1]:
        return ROW
    return STEP if weight.group % block_k == 0 else EACH


def step_depth(weight: Packed, block_k: int) -> int:
    """The depth of a step, at most block_k; within one group if that allows steps of 32 or more."""
    part = weight.group & -weight.group  # the power of two in it
    return block_k if weight.group >= weight.shape[1] or part < 32 else min(part, block_k)


@triton.jit
def _numbers(
    stored: tl.tensor,  # [N, K], or int4: bytes [N, K / 2]
    scale: tl.tensor,  # of each weight, or None
    zero: tl.tensor,  # that broadcasts to the weights, or None
    dtype: tl.constexpr,
) -> tl.tensor:
    """(values - zero) * scale [N, K] in dtype."""
    native: tl.constexpr = dtype == tl.bfloat16 and zero is None and NATIVE
    half: tl.constexpr = stored.dtype == tl.uint8
    w = stored
    if half:
        if native:
            low, high = tl.inline_asm_elementwise(
                INT4_TO_BF16, "=r,=r,=r,=r,r", [stored], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = (stored & 15).to(tl.int8), (stored >> 4).to(tl.int8)
            if zero is None:
                low, high = low - 8, high - 8
        w = tl.reshape(tl.join(low, high), [stored.shape[0], 2 * stored.shape[1]])
    elif native and stored.dtype == tl.int8:
        w = tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    if zero is not None:
        w = w.to(tl.float32) - zero
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
def packed_step(
    acc: tl.tensor,  # fp32 [N, M]
    x_ptrs: tl.tensor,  # [M, K]
    live: tl.tensor,  # [M, 1]
    values_ptrs: tl.tensor,  # [N, K] or [N, K / 2]
    scale_ptrs: tl.tensor,  # [N, 1]
    zero_ptrs: tl.tensor,  # [N, 1] or None
    row_zero: tl.tensor,  # [N, 1], the zero of the row, or None
    k: tl.tensor, depth: tl.tensor,
    group: tl.constexpr, form: tl.constexpr, even: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc + weight @ x.T of the tiles k columns on. In the form "row" acc must be scaled after the last step."""
    block_k: tl.constexpr = x_ptrs.shape[1]
    half: tl.constexpr = values_ptrs.dtype.element_ty == tl.uint8
    column = k + tl.arange(0, block_k)[None, :]
    byte = tl.arange(0, block_k // 2 if half else block_k)[None, :]
    if even:
        x = tl.load(x_ptrs + k, mask=live, other=0.0)
        stored = tl.load(values_ptrs + (k // 2 if half else k))
    else:
        x = tl.load(x_ptrs + k, mask=live & (column < depth), other=0.0)
        inside = k + (2 * byte if half else byte) < depth
        stored = tl.load(values_ptrs + (k // 2 if half else k), mask=inside, other=0.0)
    scale = None
    zero = row_zero
    if form == "each":
        scale = _load_scale(scale_ptrs, column, depth, group, form)
        if zero_ptrs is not None:
            zero = _load_scale(zero_ptrs, column, depth, group, form)
    elif form == "step" and zero_ptrs is not None:
        zero = _load_scale(zero_ptrs, k, depth, group, form)
    w = _numbers(stored, scale, zero, x.dtype)
    if form == "step":
        total = acc + tl.dot(w, tl.trans(x), input_precision="ieee") * _load_scale(scale_ptrs, k, depth, group, form)
    else:
        total = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return total
