"""2 to 16 rows times a weight that is read once, by tensor cores: what `gemv` is for one row.

A program multiplies all rows with the weights of a few outputs. Where this makes too few programs to use the memory's
bandwidth, the depth is split into parts: the programs of one block store their sums, and the last one to finish adds
them in the order of the parts, so the result does not depend on which one is last.
"""
# mypy: disallow-untyped-decorators=False

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import activate
from outpace.kernels.gemv import FusedAround, check_operands, gemv_triton
from outpace.kernels.launch_options import MAX_ROWS, has_pdl, pdl_options, row_stride
from outpace.kernels.triton_stub import tl, triton

MAX_BLOCKS = 8192  # most blocks of a product whose depth is split
WIDE = 32768  # outputs: from here on the weight is that of a language model's head


@dataclass(frozen=True, slots=True)
class FewRowsTiles:
    """How the programs of a product work: outputs and depth of a tile, tiles in flight, parts of the depth."""

    block_n: int
    block_k: int
    num_stages: int = 4
    split: int = 1
    overlaps: bool = True
    """Whether the kernel starts before the previous one ends."""


def few_rows_tiles(outputs: int, depth: int, *, gated: bool, normed: bool) -> FewRowsTiles:
    """Tiles near the best for the layers of Llama-3.1-8B, 3.2-1B and Qwen2.5-7B on an H200, launched in a row.

    Products whose depth is split have 250 to 500 programs.
    """
    if gated:
        return FewRowsTiles(64, 64, overlaps=outputs * depth <= 2**24)
    if outputs >= WIDE:
        return FewRowsTiles(64, 128, num_stages=3, overlaps=False)
    blocks = -(-outputs // 32)
    wanted = 1 if blocks >= 256 else 2 if blocks >= 128 and depth <= 4096 else 4
    if normed:
        return FewRowsTiles(32, 256, num_stages=3, split=min(wanted, -(-depth // 256)))
    return FewRowsTiles(32, 128, split=min(wanted, -(-depth // 128)), overlaps=depth <= 4096)


class Scratch:
    """Counters of arrived programs, zeros between two launches. Each stream has its own: launches of one stream are in
    order."""

    def __init__(self) -> None:
        self._counts: dict[tuple[torch.device, int], Tensor] = {}

    def counts(self, device: torch.device) -> Tensor | None:
        """The counters of the current stream; None: it has none yet, and zeros cannot be made during a capture."""
        on_gpu = device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        if (found := self._counts.get((device, stream))) is None:
            if on_gpu and torch.cuda.is_current_stream_capturing():
                return None
            found = self._counts[device, stream] = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
        return found


@triton.jit
def _tile(
    ptrs: tl.tensor, k: tl.tensor, live: tl.tensor, inside: tl.tensor,
    even: tl.constexpr, every: tl.constexpr, policy: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The tile k columns on; zeros beyond the depth, and unless `every`, in rows that are not live."""
    if even and every:
        tile = tl.load(ptrs + k, eviction_policy=policy)
    elif even:
        tile = tl.load(ptrs + k, mask=live, other=0.0, eviction_policy=policy)
    elif every:
        tile = tl.load(ptrs + k, mask=inside, other=0.0, eviction_policy=policy)
    else:
        tile = tl.load(ptrs + k, mask=live & inside, other=0.0, eviction_policy=policy)
    return tile


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x_ptr: tl.tensor,  # [M, K]
    weight_ptr: tl.tensor,  # [N, K]; gated: [2N, K]
    bias_ptr: tl.tensor,  # [N] or [2N], or None
    norm_ptr: tl.tensor,  # [K] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]
    parts_ptr: tl.tensor,  # fp32, when split
    counts_ptr: tl.tensor,  # zeros [blocks], when split
    rows: tl.tensor, outputs: tl.tensor, x_stride: tl.tensor, weight_stride: tl.tensor, add_stride: tl.tensor,
    out_stride: tl.tensor, eps: tl.tensor, weight_offset: tl.tensor,
    depth: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr, split: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:  # fmt: skip
    even: tl.constexpr = depth % block_k == 0
    tiles: tl.constexpr = (depth + block_k - 1) // block_k
    block = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, block_m)
    lane = tl.arange(0, block_n)
    n = tl.minimum(block * block_n + lane, outputs - 1)  # outputs beyond the last repeat the last
    col = tl.arange(0, block_k)[None, :]
    live = (m < rows)[:, None]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + col  # [M, K]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + col  # [N, K]
    up_ptrs = weight_ptrs + tl.cast(outputs, tl.int64) * weight_stride
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros([block_m, block_n], tl.float32)
    acc_up = acc
    squares = tl.zeros([block_m, block_k], tl.float32)
    for tile in tl.range(part * tiles // split, (part + 1) * tiles // split, num_stages=stages):
        k = tile * block_k
        inside = k + col < depth
        w = _tile(weight_ptrs, k, live, inside, even, True, "evict_first")
        x = _tile(x_ptrs, k, live, inside, even, False, "")
        if gated:
            w_up = _tile(up_ptrs, k, live, inside, even, True, "evict_first")
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            squares += wide * wide
            norm = _tile(norm_ptr + col, k, live, inside, even, True, "")
            x = (wide * (norm.to(tl.float32) + weight_offset)).to(x.dtype)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if gated:
            acc_up = tl.dot(x, tl.trans(w_up), acc_up, input_precision="ieee")
    total = tl.sum(squares, axis=1)  # [M]

    if split > 1:
        size: tl.constexpr = block_m * block_n
        span: tl.constexpr = size * (2 if gated else 1) + block_m
        mine = parts_ptr + block.to(tl.int64) * split * span
        at = m[:, None] * block_n + lane[None, :]
        tl.store(mine + part * span + at, acc)
        if gated:
            tl.store(mine + part * span + size + at, acc_up)
        if norm_ptr is not None:
            tl.store(mine + part * span + span - block_m + m, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counts_ptr + block, 1, sem="acq_rel", scope="gpu") < split - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros([block_m, block_n], tl.float32)
        acc_up = acc
        total = tl.zeros([block_m], tl.float32)
        for p in tl.static_range(split):
            acc += tl.load(mine + p * span + at, cache_modifier=".cg")
            if gated:
                acc_up += tl.load(mine + p * span + size + at, cache_modifier=".cg")
            if norm_ptr is not None:
                total += tl.load(mine + p * span + span - block_m + m, cache_modifier=".cg")
        tl.store(counts_ptr + block, 0)

    if norm_ptr is not None:
        scale = tl.rsqrt(total / depth + eps)[:, None]
        acc *= scale
        acc_up *= scale
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
        if gated:
            acc_up += tl.load(bias_ptr + outputs + n).to(tl.float32)[None, :]
    if activation is not None:
        acc = activate(acc, activation)
    if gated:
        acc *= acc_up
    here = block * block_n + lane[None, :]
    mask = live & (here < outputs)
    row = m.to(tl.int64)[:, None]
    if add_ptr is not None:
        acc += tl.load(add_ptr + row * add_stride + here, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + here, acc.to(out_ptr.dtype.element_ty), mask=mask)


def few_rows_triton(
    x: Tensor, weight: Tensor, *, counts: Tensor | None = None, tiles: FewRowsTiles | None = None, **around: Any
) -> Tensor:
    """`fused_linear_torch` for several rows, only with an RMS norm. x times the norm's weight is rounded, and the sum
    once.

    counts: zeros [MAX_BLOCKS], which are zeros again afterwards; None: the depth is not split.
    """
    f = FusedAround(**around)
    assert not f.centered, "a layer norm of several rows is not folded"
    (rows, depth), outputs = x.shape, weight.shape[0] // f.halves
    out = f.out_for(x, outputs)
    check_operands(x, weight, f, out)
    if out.numel() == 0:
        return out
    tiles = tiles or few_rows_tiles(outputs, depth, gated=f.halves == 2, normed=f.norm_weight is not None)
    blocks, block_m = triton.cdiv(outputs, tiles.block_n), max(16, triton.next_power_of_2(rows))
    split = 1 if counts is None or blocks > len(counts) else tiles.split
    span = block_m * (tiles.block_n * f.halves + 1)
    parts = torch.empty(blocks * split * span, device=x.device) if split > 1 else None
    _few_rows_kernel[(blocks, split)](
        *(x, weight, f.bias, f.norm_weight, f.add, out, parts, None if split == 1 else counts, rows, outputs),
        *(row_stride(x), weight.stride(0), row_stride(f.add), row_stride(out), f.eps, f.weight_offset),
        depth=depth,
        activation=f.kind,
        gated=f.halves == 2,
        split=split,
        block_m=block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        stages=tiles.num_stages,
        num_warps=4,
        num_stages=tiles.num_stages,
        **pdl_options(tiles.overlaps and has_pdl(x.device)),
    )
    return out


def takes_few_rows(rows: int, dtype: torch.dtype) -> bool:
    """Whether `linear_few_rows` takes this many rows: one of any dtype, several if tensor cores multiply them.

    8 rows of the 8B: 117 us a layer with norm, activation and sum, and 117 by cuBLAS for the products alone.
    """
    return rows == 1 or (1 < rows <= MAX_ROWS and dtype.itemsize == 2)


def folds_norm(rows: int, dtype: torch.dtype, *, centered: bool) -> bool:
    """Whether the product includes the norm before it: not a layer norm of several rows, and for several rows not fp16,
    in which rows times the norm's weight could overflow."""
    return rows == 1 or (not centered and dtype == torch.bfloat16)


def linear_few_rows(x: Tensor, weight: Tensor, *, scratch: Scratch | None = None, **around: Any) -> Tensor:
    """One row by `gemv`, several by tensor cores. around: see `FusedAround`."""
    if len(x) == 1:
        return gemv_triton(x, weight, **around)
    counts = None if scratch is None else scratch.counts(x.device)
    return few_rows_triton(x, weight, counts=counts, **around)
