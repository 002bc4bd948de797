"""Rows times a quantized weight that is read exactly once: device code that linears and experts of few rows share.

Tiles are [M, N, G, C, 8] of G groups of columns. A thread holds 8 columns (a chunk), adds their products, and applies
the scale and the zero of the group to that sum: y += scale * (sum(values * x) - zero * sum(x)). Chunks of 8 make the
layouts of x and of the values the same, so that nothing crosses threads before the end.
"""
# mypy: disallow-untyped-decorators=False

from outpace.kernels.packed_words import add_words, four
from outpace.kernels.triton_stub import tl, triton


@triton.jit
def _load(ptrs: tl.tensor, k: tl.tensor, inside: tl.tensor, even: tl.constexpr, policy: tl.constexpr) -> tl.tensor:
    """The tile k numbers on, zero where not `inside`."""
    ptrs = tl.max_contiguous(ptrs + k, [1, 1, 2, 4, 8])  # see packed_product
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
    """Scales, or zeros, of the groups that contain these columns."""
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
    depth: tl.constexpr, even: tl.constexpr, has_zero: tl.constexpr, grouped: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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
    depth: tl.constexpr, group: tl.constexpr, default_zero: tl.constexpr, pdl: tl.constexpr,
    block_k: tl.constexpr, chunk: tl.constexpr, words: tl.constexpr = 0,
) -> tl.tensor:  # fmt: skip
    """(x * norm) @ weight.T [M, N] and the mean square of each row of x [M], in fp32; with pdl it waits for x."""
    block_m: tl.constexpr = x_rows.shape[0]
    tile_n: tl.constexpr = values_rows.shape[1]
    even: tl.constexpr = depth % block_k == 0
    last: tl.constexpr = (depth - 1) // block_k * block_k  # where the last tile begins
    grouped: tl.constexpr = group < depth
    grouped_zero: tl.constexpr = grouped and zero_rows is not None
    element: tl.constexpr = values_rows.dtype.element_ty
    # columns of an element
    columns: tl.constexpr = chunk // words if element == tl.int32 else (2 if element == tl.uint8 else 1)
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
    # Threads must get G and C before M and N. The compiler deals dimensions to threads in the order of contiguity, and
    # uses the contiguity of no dimension but the last for anything else.
    x_ptrs = tl.max_contiguous(x_rows + col, [1, 1, 2, 4, 8])
    norm_ptrs = None if norm_ptr is None else tl.max_contiguous(norm_ptr + col, [1, 1, 2, 4, 8])
    values_ptrs = tl.max_contiguous(values_rows + (begin // columns + byte), [1, 1, 2, 4, 8])
    scale = 1.0
    zero = default_zero + 0.0
    if zero_rows is not None and not grouped:
        zero = tl.load(zero_rows).to(tl.float32)

    # The first weights are loaded before the wait: the previous kernel writes x and add, never weights.
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
    for k in range(0, last, block_k):  # the next tile is loaded to registers while this one is used
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
