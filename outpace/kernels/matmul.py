"""The product of every linear layer, and a form of it in which a row's result does not depend on the other rows.

A library picks its kernel by the number of rows, and with it the order in which the products of one output are added.
Here the order is fixed by the weight alone. The depth is split into chunks (`chunk_depth`); a chunk is summed from left
to right by the same matrix instructions, and the sums of the chunks are added from the first to the last. With few rows
each chunk has its own program, so that there are enough to use the memory's bandwidth, and a second kernel adds their
sums; with many rows one program takes all chunks. Both add the same numbers in the same order: tiles change the speed
and no bit of the result.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.launch_options import has_pdl, pdl_options
from outpace.kernels.triton_stub import tl, triton

BLOCK_ROWS = 32  # rows of a product in the torch form
PROGRAMS = 132  # that fill a GPU: the SMs of an H200
CHUNK_STEP = 128  # a chunk is a multiple of this, and with it of every block_k
MIN_CHUNK = 512
MIN_PROGRAMS = 256  # for few rows: about two per SM
MAX_CHUNKS = 8
ADD_BLOCK = 512  # outputs of a program that adds chunks
PIECE = 2048  # rows
WIDE = 16384  # outputs of a weight with which many rows are multiplied a piece at a time
"""8,192 rows times the 8B's gate and up on an H200: 2.72 ms at once, 2.46 in pieces; Qwen2.5-7B's 3.16 and 2.80. With
fewer outputs it takes as long either way."""
MMA_ROWS = 64  # fewer take another matrix instruction on Hopper, which may add in another order


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """How the programs of a product work. `split`: a program for each chunk; else one program for all chunks.

    `group_m` row tiles pass over the columns together, so that what they read is still in the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 4
    split: bool = False
    group_m: int = 8


def chunk_depth(outputs: int, depth: int) -> int:
    """The depth of one chunk. It sets the order of additions, so it must never depend on the rows.

    A power-of-two number of chunks, about two programs of 64 outputs per SM for small batches; one for wide weights.
    """
    tiles = max(1, -(-outputs // 64))
    wanted = 1 << (-(-MIN_PROGRAMS // tiles) - 1).bit_length()
    chunks = max(1, min(wanted, depth // MIN_CHUNK, MAX_CHUNKS))
    return -(-depth // (chunks * CHUNK_STEP)) * CHUNK_STEP


def matmul_tiles(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> MatmulTiles:
    """The default tiles, from a sweep over the 8B's layers on an H200 (bench/kernels.py), all with the same bits.

    64 rows: 123 us a layer against cuBLAS's 126; 256: 227 against 178; 2048: 1,560 against 1,130.
    """
    chunks = -(-depth // chunk_depth(outputs, depth))
    if dtype == torch.float32:  # no matrix instruction: every thread adds its outputs from left to right
        block_m = 16 if rows <= 16 else 64
        few = -(-rows // block_m) * -(-outputs // 64) < PROGRAMS
        return MatmulTiles(block_m, 64, 16, split=few and chunks > 1)
    if rows <= MMA_ROWS:
        if chunks == 1 and outputs > 64 * PROGRAMS:
            return MatmulTiles(MMA_ROWS, 128, num_stages=5)
        return MatmulTiles(MMA_ROWS, 64 if -(-outputs // 64) * chunks > PROGRAMS else 32, split=chunks > 1)
    if rows <= 128 and chunks > 1:
        return MatmulTiles(MMA_ROWS, 128, split=True)
    split = -(-rows // 128) * -(-outputs // 128) < PROGRAMS and chunks > 1
    return MatmulTiles(128, 128, num_warps=8, num_stages=4 if chunks > 1 else 3, split=split)


def matmul_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias + add by torch's own products. x: [M, K], weight: [N, K] → [M, N]; out may be add."""
    bare = add is bias is out is None and x.is_cuda and not x.requires_grad
    if bare and len(x) >= 2 * PIECE and weight.shape[0] >= WIDE:
        y = _in_pieces(x, weight)
    elif add is None:
        y = F.linear(x, weight, bias)
    elif bias is None:
        y = (add.addmm_ if out is add else add.addmm)(x, weight.t())  # the sum is taken in the epilogue
    else:
        y = F.linear(x, weight, bias)
        y = add.add_(y) if out is add else y + add
    return y if out is None or out is y else out.copy_(y)


def _in_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """The product, `PIECE` rows at a time."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    for rows, into in zip(x.split(PIECE), y.split(PIECE), strict=True):
        torch.mm(rows, weight.t(), out=into)
    return y


def matmul_invariant_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias + add, each row bit for bit as if it were alone. x: [M, K], weight: [N, K] → [M, N].

    The library sees products of one shape: blocks of rows, padded with zeros.

    The weight is the left operand: as the right one, MKL adds the rows of one block in different orders where the
    outputs are few. The product is rounded before the sum with bias and add.
    """
    (rows, depth), outputs = x.shape, weight.shape[0]
    blocks = -(-rows // BLOCK_ROWS)
    padded = x.new_zeros(blocks * BLOCK_ROWS, depth)  # always a copy: alignment changes the order too
    padded[:rows] = x
    y = x.new_empty(blocks * BLOCK_ROWS, outputs)
    for into, block in zip(y.split(BLOCK_ROWS), padded.split(BLOCK_ROWS), strict=True):
        into.copy_((weight @ block.t()).t())
    y = y[:rows]
    if bias is not None or add is not None:
        total = y.float()
        for term in (bias, add):
            total = total if term is None else total + term.float()
        y = total.to(x.dtype)
    return y if out is None else out.copy_(y)


@triton.jit
def _sum_chunk(
    x_ptrs: tl.tensor,  # [M, K]
    weight_ptrs: tl.tensor,  # [N, K]
    live: tl.tensor,  # [M, 1]
    col: tl.tensor,  # [1, K]
    start: tl.tensor, depth: tl.tensor, chunk: tl.tensor,
    even: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The products of one chunk, added from left to right: fp32 [M, N]."""
    acc = tl.zeros([block_m, block_n], tl.float32)
    for k in range(start, tl.minimum(start + chunk, depth), block_k):
        if even:
            x = tl.load(x_ptrs + k, mask=live, other=0.0)
            weight = tl.load(weight_ptrs + k)
        else:
            inside = k + col < depth
            x = tl.load(x_ptrs + k, mask=live & inside, other=0.0)
            weight = tl.load(weight_ptrs + k, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def add_and_store(
    y: tl.tensor,  # fp32 [M, N], or outputs in a row
    m: tl.tensor,  # [M, 1]
    n: tl.tensor,  # [1, N]
    bias_ptr: tl.tensor, add_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, outputs: tl.tensor,
    add_stride: tl.tensor, out_stride: tl.tensor,
) -> None:  # fmt: skip
    """out = y + bias + add, rounded once."""
    mask = (m < rows) & (n < outputs)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    if add_ptr is not None:
        y += tl.load(add_ptr + m * add_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * out_stride + n, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr: tl.tensor,  # [M, K]
    weight_ptr: tl.tensor,  # [N, K]
    bias_ptr: tl.tensor,  # [N] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]; when split: fp32 [chunks, M, N]
    rows: tl.tensor, outputs: tl.tensor, depth: tl.tensor,
    chunk: tl.tensor,  # a multiple of 16, which Triton must know: otherwise loads are not pipelined
    x_stride: tl.tensor, weight_stride: tl.tensor, add_stride: tl.tensor, out_stride: tl.tensor,
    one_chunk: tl.constexpr, even: tl.constexpr, split: tl.constexpr, pdl: tl.constexpr,
    group_m: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    band = group_m * tl.cdiv(outputs, block_n)  # programs of one group of row tiles
    first = tl.program_id(0) // band * group_m
    height = tl.minimum(tl.cdiv(rows, block_m) - first, group_m)
    place = tl.program_id(0) % band
    m = ((first + place % height) * block_m + tl.arange(0, block_m)).to(tl.int64)[:, None]  # [M, 1]
    n = ((place // height) * block_n + tl.arange(0, block_n)).to(tl.int64)  # [N]
    col = tl.arange(0, block_k)[None, :]
    x_ptrs = x_ptr + m * x_stride + col
    weight_ptrs = weight_ptr + tl.minimum(n, outputs - 1)[:, None] * weight_stride + col  # the last row again
    n = n[None, :]
    live = m < rows

    if split:
        c = tl.program_id(1)
        y = _sum_chunk(x_ptrs, weight_ptrs, live, col, c * chunk, depth, chunk, even, block_m, block_n, block_k)
        out_ptr += c.to(tl.int64) * rows * out_stride
        add_and_store(y, m, n, None, None, out_ptr, rows, outputs, add_stride, out_stride)
    else:
        if one_chunk:
            y = _sum_chunk(x_ptrs, weight_ptrs, live, col, 0, depth, chunk, even, block_m, block_n, block_k)
        else:
            y = tl.zeros([block_m, block_n], tl.float32)
            for start in range(0, depth, chunk):
                y += _sum_chunk(x_ptrs, weight_ptrs, live, col, start, depth, chunk, even, block_m, block_n, block_k)
        add_and_store(y, m, n, bias_ptr, add_ptr, out_ptr, rows, outputs, add_stride, out_stride)


@triton.jit(do_not_specialize=["rows"])
def _add_chunks_kernel(
    parts_ptr: tl.tensor,  # fp32 [chunks, M, N]
    bias_ptr: tl.tensor, add_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [M, N]
    rows: tl.tensor, outputs: tl.tensor, add_stride: tl.tensor, out_stride: tl.tensor,
    chunks: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    size = rows * outputs  # fits in 32 bits, which divide faster
    at = tl.program_id(0) * block + tl.arange(0, block)
    y = tl.zeros([block], tl.float32)
    for c in tl.static_range(chunks):
        y += tl.load(parts_ptr + tl.cast(size, tl.int64) * c + at, mask=at < size, other=0.0)
    m = (at // outputs).to(tl.int64)
    add_and_store(y, m, at % outputs, bias_ptr, add_ptr, out_ptr, rows, outputs, add_stride, out_stride)


def add_chunks(parts: Tensor, bias: Tensor | None, add: Tensor | None, out: Tensor, chunks: int, pdl: bool) -> None:
    """out = the sum of fp32 parts [chunks * M, N], from the first to the last, + bias + add."""
    rows, outputs = out.shape
    _add_chunks_kernel[(triton.cdiv(rows * outputs, ADD_BLOCK),)](
        *(parts, bias, add, out, rows, outputs, _row_stride(add), _row_stride(out)),
        chunks=chunks,
        block=ADD_BLOCK,
        **pdl_options(pdl),
    )


def _row_stride(x: Tensor | None) -> int:
    """Row stride of x; for a single row its width, so that its stride does not compile another variant."""
    return 0 if x is None else x.shape[1] if x.shape[0] == 1 else x.stride(0)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], *likes: Tensor | None) -> None:
    """Assert the shapes, dtypes and strides that the kernels rely on; likes have the shape of the output."""
    depth, dtype = x.shape[1], x.dtype
    assert (weight.shape[1], weight.dtype) == (depth, dtype), (x.shape, dtype, weight.shape, weight.dtype)
    assert depth > 0, "rows must not be empty"
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    assert all(t is None or (t.shape, t.dtype) == (shape, dtype) for t in likes), f"neither {shape} nor {dtype}"
    assert all(t is None or t.shape[1] == 1 or t.stride(1) == 1 for t in (x, weight, *likes)), "rows must be contiguous"


def matmul_invariant_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
    tiles: MatmulTiles | None = None,
) -> Tensor:
    """matmul_invariant_torch by Triton, rounded once. out may be add, never x.

    With few rows it starts before the previous kernel ends, which must not write weight or bias.
    """
    (rows, depth), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    _check(x, weight, bias, (rows, outputs), add, out)
    if out.numel() == 0:
        return out
    tiles = tiles or matmul_tiles(rows, outputs, depth, x.dtype)
    chunk = chunk_depth(outputs, depth)
    chunks = -(-depth // chunk)
    assert CHUNK_STEP % tiles.block_k == 0, tiles
    assert x.dtype == torch.float32 or tiles.block_m >= MMA_ROWS, f"{tiles}: another matrix instruction"
    pdl = rows <= MMA_ROWS and has_pdl(x.device)
    split = tiles.split and chunks > 1
    assert not split or rows * outputs < 2**31, "this many rows need no split"
    target = torch.empty((chunks * rows, outputs), device=x.device) if split else out
    grid = triton.cdiv(rows, tiles.block_m) * triton.cdiv(outputs, tiles.block_n)
    _matmul_kernel[(grid, chunks if split else 1)](
        *(x, weight, bias, add, target, rows, outputs, depth, chunk),
        *(_row_stride(x), weight.stride(0), _row_stride(add), target.stride(0) if split else _row_stride(out)),
        one_chunk=chunks == 1,
        even=depth % tiles.block_k == 0,
        split=split,
        group_m=tiles.group_m,
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(pdl),
    )
    if split:
        add_chunks(target, bias, add, out, chunks, pdl)
    return out
