"""A few rows times a quantized weight that is read exactly once, with what stands before and behind the product.

As gemv.py, with tiles [M, N, G, C, 8] of G groups of columns. A thread holds 8 columns (a chunk), adds their products,
and applies the scale and the zero of the group to that sum: y += scale * (sum(values * x) - zero * sum(x)). Chunks of 8
make the layouts of x and of the values the same, so that nothing crosses threads before the end.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.kernels.activation import activate, activation_kind
from outpace.kernels.gemv import MAX_ROWS, has_pdl
from outpace.kernels.packed import Packed
from outpace.kernels.packed_words import add_words, four
from outpace.kernels.triton_stub import tl, triton

CHUNK = 8  # columns
WORDS = (4, 2)  # of 32 bits in a chunk that is read as words


@triton.jit
def _load(ptrs: tl.tensor, k: tl.tensor, inside: tl.tensor, even: tl.constexpr, policy: tl.constexpr) -> tl.tensor:
    """The tile k numbers on, zero where it is not inside."""
    ptrs = tl.max_contiguous(ptrs + k, [1, 1, 2, 4, 8])  # see _packed_gemv_kernel
    if even:
        tile = tl.load(ptrs, eviction_policy=policy)
    else:
        tile = tl.load(ptrs, mask=inside, other=0.0, eviction_policy=policy)
    return tile


@triton.jit
def _load_scales(
    ptrs: tl.tensor,  # [1, N, 1, 1]
    column: tl.tensor,  # [1, 1, G, 1]: the first of each group
    depth: tl.constexpr,
    group: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """Scales, or zeros, of the groups that begin at these columns, or that these columns are in."""
    ptrs += column // group
    return (tl.load(ptrs) if even else tl.load(ptrs, mask=column < depth, other=0.0)).to(tl.float32)


@triton.jit
def _load_x(
    squares: tl.tensor,  # [M, 1, G, C]
    x_ptrs: tl.tensor,  # [M, 1, G, C, 8]
    norm_ptrs: tl.tensor,  # [1, 1, G, C, 8] or None
    offset: tl.tensor,
    col: tl.tensor,  # [1, 1, G, C, 8]
    k: tl.tensor,
    depth: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """x in fp32, times the weight of the norm, and squares + x * x."""
    x = _load(x_ptrs, k, k + col < depth, even, "").to(tl.float32)
    if norm_ptrs is not None:
        squares += tl.sum(x * x, axis=4)
        x *= _load(norm_ptrs, k, k + col < depth, even, "").to(tl.float32) + offset
    return x, squares


@triton.jit
def _add_chunks(
    acc: tl.tensor,  # [M, N, G, C]
    squares: tl.tensor,  # [M, 1, G, C]
    values: tl.tensor,  # [1, N, G, C, 8], for int4 [1, N, G, C, 4], as words [1, N, G, C, 2 or 4]
    scale: tl.tensor,  # [1, N, G, 1], or a number
    zero: tl.tensor,  # as scale
    x_ptrs: tl.tensor,  # [M, 1, G, C, 8]
    norm_ptrs: tl.tensor,  # [1, 1, G, C, 8] or None
    offset: tl.tensor,
    col: tl.tensor,  # [1, 1, G, C, 8]
    k: tl.tensor,
    depth: tl.constexpr,
    even: tl.constexpr,
    has_zero: tl.constexpr,
    grouped: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """acc + scale * (values * x - zero * x) of each chunk, and squares + x * x."""
    x, squares = _load_x(squares, x_ptrs, norm_ptrs, offset, col, k, depth, even)
    if values.dtype == tl.int32:
        part = tl.zeros_like(acc) if grouped else acc
        width: tl.constexpr = values.shape[4]
        if width == 4:
            first, second, third, fourth = four(values)
        else:
            first, second = tl.split(values)
        if chunk == 4 * width:  # int8: two words a piece
            part = add_words(part, x, first, second, zero)
            if width == 4:
                x, squares = _load_x(squares, x_ptrs, norm_ptrs, offset, col, k + 8, depth, even)
                part = add_words(part, x, third, fourth, zero)
        else:
            part = add_words(part, x, first, None, zero)
            x, squares = _load_x(squares, x_ptrs, norm_ptrs, offset, col, k + 8, depth, even)
            part = add_words(part, x, second, None, zero)
            if width == 4:
                x, squares = _load_x(squares, x_ptrs, norm_ptrs, offset, col, k + 16, depth, even)
                part = add_words(part, x, third, None, zero)
                x, squares = _load_x(squares, x_ptrs, norm_ptrs, offset, col, k + 24, depth, even)
                part = add_words(part, x, fourth, None, zero)
        acc = acc + part * scale if grouped else part
    else:
        if values.dtype == tl.uint8:  # two of 4 bits, each put into the bits of a float, 128 + v, without a conversion
            pairs: tl.constexpr = [x.shape[0], 1, x.shape[2], x.shape[3], x.shape[4] // 2, 2]
            first, second = tl.split(tl.reshape(x, pairs))
            low = ((values & 15).to(tl.int32) << 16 | 0x43000000).to(tl.float32, bitcast=True)
            high = ((values >> 4).to(tl.int32) << 16 | 0x43000000).to(tl.float32, bitcast=True)
            part = tl.sum(first * low + second * high, axis=4)
            zero = zero + 128.0
        else:
            part = tl.sum(x * values.to(tl.float32), axis=4)
        if has_zero:
            part -= zero * tl.sum(x, axis=4)
        acc += part * scale
    return acc, squares


@triton.jit
def packed_product(
    x_rows: tl.tensor,  # [M, 1, 1, 1, 1]: pointers to rows of x
    norm_ptr: tl.tensor,  # [K] or None
    values_rows: tl.tensor,  # [1 or M, N, 1, 1, 1]: pointers to rows of values
    scale_rows: tl.tensor,  # [1 or M, N, 1, 1]
    zero_rows: tl.tensor,  # as scale_rows, or None
    weight_offset: tl.tensor,
    depth: tl.constexpr,
    group: tl.constexpr,
    default_zero: tl.constexpr,
    pdl: tl.constexpr,
    block_k: tl.constexpr,
    chunk: tl.constexpr,
    words: tl.constexpr = 0,
) -> tl.tensor:
    """(x * norm) @ weight.T [M, N] and the mean square of each row of x [M], in fp32; with pdl it waits for x."""
    block_m: tl.constexpr = x_rows.shape[0]
    tile_n: tl.constexpr = values_rows.shape[1]
    even: tl.constexpr = depth % block_k == 0
    last: tl.constexpr = (depth - 1) // block_k * block_k  # where the last tile begins
    grouped: tl.constexpr = group < depth
    grouped_zero: tl.constexpr = grouped and zero_rows is not None
    element: tl.constexpr = values_rows.dtype.element_ty
    columns: tl.constexpr = (
        chunk // words if element == tl.int32 else (2 if element == tl.uint8 else 1)
    )  # of an element
    piece: tl.constexpr = 8
    has_zero: tl.constexpr = zero_rows is not None or columns == 2
    groups: tl.constexpr = block_k // group if grouped and group < block_k else 1  # of a tile
    chunks: tl.constexpr = block_k // groups // chunk  # of a group in it
    g = tl.arange(0, groups)[None, None, :, None]
    begin = (g[:, :, :, :, None] * chunks + tl.arange(0, chunks)[None, None, None, :, None]) * chunk
    byte = tl.arange(0, chunk // columns)[None, None, None, None, :]
    col = begin + tl.arange(0, piece)[None, None, None, None, :]
    column = g * (chunks * chunk)
    byte_col = begin + byte * columns
    # G and C are to be dealt to threads before M and N. The compiler deals dimensions in the order of contiguity, and
    # looks at that of no other than the last for anything else.
    x_ptrs = tl.max_contiguous(x_rows + col, [1, 1, 2, 4, 8])
    norm_ptrs = None if norm_ptr is None else tl.max_contiguous(norm_ptr + col, [1, 1, 2, 4, 8])
    values_ptrs = tl.max_contiguous(values_rows + (begin // columns + byte), [1, 1, 2, 4, 8])
    scale = 1.0
    zero = default_zero + 0.0
    if zero_rows is not None and not grouped:
        zero = tl.load(zero_rows).to(tl.float32)

    # The first weights are under way before the wait: the kernel in front writes x and add, never weights.
    values = _load(values_ptrs, 0, byte_col < depth, even, "evict_first")
    if grouped:
        scale = _load_scales(scale_rows, column, depth, group, even)
    if grouped_zero:
        zero = _load_scales(zero_rows, column, depth, group, even)
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([block_m, tile_n, groups, chunks], tl.float32)
    squares = tl.zeros([block_m, 1, groups, chunks], tl.float32)
    # fmt: off
    for k in range(0, last, block_k):  # the next tile is under way to registers while one is used
        at = k + block_k
        now = values
        values = _load(values_ptrs, at // columns, at + byte_col < depth, even, "evict_first")
        if grouped_zero:
            now_scale, now_zero = scale, zero
            scale = _load_scales(scale_rows, at + column, depth, group, even)
            zero = _load_scales(zero_rows, at + column, depth, group, even)
            acc, squares = _add_chunks(
                acc, squares, now, now_scale, now_zero, x_ptrs, norm_ptrs, weight_offset, col, k, depth, True, has_zero,
                grouped, chunk,
            )
        elif grouped:
            now_scale = scale
            scale = _load_scales(scale_rows, at + column, depth, group, even)
            acc, squares = _add_chunks(
                acc, squares, now, now_scale, zero, x_ptrs, norm_ptrs, weight_offset, col, k, depth, True, has_zero,
                grouped, chunk,
            )
        else:
            acc, squares = _add_chunks(
                acc, squares, now, scale, zero, x_ptrs, norm_ptrs, weight_offset, col, k, depth, True, has_zero,
                grouped, chunk,
            )
    acc, squares = _add_chunks(
        acc, squares, values, scale, zero, x_ptrs, norm_ptrs, weight_offset, col, last, depth, even, has_zero,
        grouped, chunk,
    )
    # fmt: on
    y = tl.sum(tl.reshape(acc, [block_m, tile_n, groups * chunks]), axis=2)  # [M, N]
    if not grouped:
        y *= tl.reshape(tl.load(scale_rows), [scale_rows.shape[0], tile_n]).to(tl.float32)
    return y, tl.sum(tl.reshape(squares, [block_m, groups * chunks]), axis=1) / depth


@triton.jit
def _packed_gemv_kernel(
    x_ptr: tl.tensor,  # [M, K]
    values_ptr: tl.tensor,  # [N, K] or [N, ceil(K / 2)]; gated: 2N rows
    scale_ptr: tl.tensor,  # [ceil(N / shared_rows), ceil(K / group)]
    zero_ptr: tl.tensor,  # as scale, or None
    bias_ptr: tl.tensor,  # [N] or [2N], or None
    norm_ptr: tl.tensor,  # [K] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]
    outputs: tl.tensor,
    x_stride: tl.tensor,
    values_stride: tl.tensor,
    scale_stride: tl.tensor,
    zero_stride: tl.tensor,
    add_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    weight_offset: tl.tensor,
    rows: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    shared_rows: tl.constexpr,
    default_zero: tl.constexpr,
    activation: tl.constexpr,
    pdl: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    chunk: tl.constexpr,
    words: tl.constexpr,
) -> None:
    # A gated tile holds gate and up rows in turn. Beyond the last row lies the last row again.
    tile_n: tl.constexpr = block_n if activation is None else 2 * block_n
    first = tl.program_id(0) * block_n
    lane = tl.arange(0, tile_n)
    if activation is None:
        row = tl.minimum(first + lane, outputs - 1)
    else:
        row = tl.minimum(first + lane // 2, outputs - 1) + lane % 2 * outputs
    m = tl.minimum(tl.arange(0, block_m), rows - 1).to(tl.int64)[:, None, None, None, None]
    n = row.to(tl.int64)[None, :, None, None]
    y, squares = packed_product(
        x_ptr + m * x_stride,
        norm_ptr,
        values_ptr + n[:, :, :, :, None] * values_stride,
        scale_ptr + n // shared_rows * scale_stride,
        None if zero_ptr is None else zero_ptr + n // shared_rows * zero_stride,
        weight_offset,
        depth,
        group,
        default_zero,
        pdl,
        block_k,
        chunk,
        words,
    )
    if norm_ptr is not None:
        y *= tl.rsqrt(squares + eps)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if activation is not None:
        gate, up = tl.split(tl.reshape(y, [block_m, block_n, 2]))
        y = activate(gate, activation) * up
    out_m = tl.arange(0, block_m)[:, None].to(tl.int64)
    out_n = first + tl.arange(0, block_n)[None, :]
    mask = (out_m < rows) & (out_n < outputs)
    if add_ptr is not None:
        y += tl.load(add_ptr + out_m * add_stride + out_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_m * out_stride + out_n, y.to(out_ptr.dtype.element_ty), mask=mask)


def packed_gemv_config(kind: str, rows: int, outputs: int, depth: int, gated: bool) -> dict[str, int]:
    """The tiles that win on an H200 with a single row (bench/results/packed_sweep_*): 128 bytes for every thread."""
    block_n, block_k, warps = (8, 2048, 2) if kind == "int4" else (8, 2048, 4)
    if kind == "fp8" and depth > 8192:
        block_k = 1024
    if rows > 1:
        block_n = 4 if rows == 2 else 2
    width: int = max(CHUNK, triton.next_power_of_2(depth))
    if width < block_k:
        block_k, warps = width, max(1, min(warps, width // 512))
    return {"block_n": max(1, block_n // 2) if gated else block_n, "block_k": block_k, "num_warps": warps}


def takes_chunks(weight: Packed) -> bool:
    """Whether a chunk of columns never has two scales, which the kernel of few rows relies on."""
    return weight.group >= weight.shape[1] or weight.group % CHUNK == 0


def words_of_chunk(weight: Packed, dtype: torch.dtype) -> int:
    """How many words a chunk has if a weight is read as words, which is for x of 16 bits; 0: it is read as bytes."""
    bits, group = {"int8": 8, "int4": 4}.get(weight.kind), weight.group
    if bits is None or dtype.itemsize != 2 or weight.values.data_ptr() % 16:
        return 0
    if weight.shape[1] * bits % 32 or any(
        stride * weight.values.element_size() % 4 for stride in weight.values.stride()[:-1]
    ):
        return 0
    whole = group >= weight.shape[1]
    return next((words for words in WORDS if whole or group % (words * 32 // bits) == 0), 0)


def fitting_depth(weight: Packed, block_k: int) -> int:
    """The widest tile up to block_k that holds whole groups, or lies within one."""
    if weight.group >= weight.shape[1] or weight.group & (weight.group - 1) == 0:
        return block_k
    return min(block_k, weight.group & -weight.group)  # the power of two in it


def row_stride(x: Tensor | None) -> int:
    """Distance of the rows of x; 0 where there is but one, so that its stride makes no new variant of a kernel."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def check_packed(x: Tensor, weight: Packed, bias: Tensor | None, shape: tuple[int, int], *likes: Tensor | None) -> None:
    """What the kernels rely on in shapes, dtypes and strides; likes have the shape of the output."""
    assert weight.experts is None, "a stack of experts is no linear"
    assert x.shape[1] == weight.shape[1] > 0, (x.shape, weight.shape)
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()), "bias"
    assert all(t is None or (t.shape, t.dtype) == (shape, x.dtype) for t in likes), f"neither {shape} nor {x.dtype}"
    rows = (x, weight.values, weight.scale, weight.zero, *likes)
    assert all(t is None or t.shape[1] == 1 or t.stride(1) == 1 for t in rows), "rows must be contiguous"


def packed_gemv_triton(
    x: Tensor,
    weight: Packed,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    activation: str | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """packed_linear_ref in one kernel for up to MAX_ROWS rows, rounded once. out may be add, never x; pdl: as gemv."""
    rows, depth = x.shape
    assert rows <= MAX_ROWS, f"{rows} rows are more than {MAX_ROWS}"
    assert activation is None or weight.shape[0] % 2 == 0, f"{weight.shape[0]} rows have no two halves"
    assert takes_chunks(weight), f"groups of {weight.group} columns are no multiple of {CHUNK}"
    outputs = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    check_packed(x, weight, bias, (rows, outputs), add, out)
    assert norm_weight is None or (norm_weight.shape == x.shape[1:] and norm_weight.is_contiguous())
    if out.numel() == 0:
        return out
    meta = {**packed_gemv_config(weight.kind, rows, outputs, depth, activation is not None), **(config or {})}
    words = meta.pop("words", words_of_chunk(weight, x.dtype))
    chunk = CHUNK if words == 0 else words * (8 if weight.kind == "int4" else 4)
    values = weight.values if words == 0 else weight.values.view(torch.int32)
    meta["block_k"] = fitting_depth(weight, max(chunk, meta["block_k"]))
    pdl = (activation is None and norm_weight is None if pdl is None else pdl) and has_pdl(x.device)
    _packed_gemv_kernel[(triton.cdiv(outputs, meta["block_n"]),)](
        *(x, values, weight.scale, weight.zero, bias, norm_weight, add, out, outputs),
        *(row_stride(x), row_stride(values), row_stride(weight.scale), row_stride(weight.zero)),
        *(row_stride(add), row_stride(out), eps, weight_offset),
        rows=rows,
        depth=depth,
        group=min(weight.group, depth),
        shared_rows=weight.block,
        default_zero=weight.default_zero,
        activation=None if activation is None else activation_kind(activation),
        pdl=pdl,
        block_m=triton.next_power_of_2(rows),
        chunk=chunk,
        words=words,
        **meta,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
