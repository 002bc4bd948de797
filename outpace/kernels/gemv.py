"""A few rows times a weight that is read exactly once: decode's linear layers, with what stands before and behind them.

One program computes a few outputs: it streams their weight rows past the caches, while x, which every program reads,
stays in them. The norm in front needs no pass of its own, since its scale is one number per row of x:
y = rstd * sum_k(x * norm_weight * W), and the sum_k(x * x) behind rstd is gathered on the way.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.activation import activate, activation_kind, gated_act_ref
from outpace.kernels.rms_norm import rms_norm_ref
from outpace.kernels.triton_stub import tl, triton

MAX_ROWS = 16  # of x: more are for tensor cores


def prefers_gemv(rows: int, outputs: int, depth: int, *, gated: bool) -> bool:
    """Whether the kernel is faster than cuBLAS, as measured on an H200 in bf16 over the layers of three models.

    One row: always (8B: 3.71 ms a token against 4.02 for the bare products). Two rows: where the weight is not wide
    (8B's o: 9.9 us against 12.4; its gate_up: 67 against 60). Four: never.
    """
    return min(outputs, depth) > 0 and (rows == 1 or (rows == 2 and outputs <= 8192 and not gated))


def gemv_ref(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    activation: str | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight.T + bias, then act(gate) * up of its halves, then + add. x: [M, K], weight: [N, K] → [M, N].

    With an activation the weight is [2I, K], gate rows first, and the output [M, I]. No norm_weight means no norm.
    """
    if norm_weight is not None:
        x, _ = rms_norm_ref(x, norm_weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight)
    y = F.linear(x, weight, bias)
    y = y if activation is None else gated_act_ref(y, activation)
    y = y if add is None else y + add
    return y if out is None else out.copy_(y)


@triton.jit
def _load(
    ptrs: tl.tensor, col: tl.tensor, k: tl.tensor, depth: tl.constexpr, even: tl.constexpr, policy: tl.constexpr
) -> tl.tensor:
    """The tile k columns on, zero beyond the depth."""
    if even:
        tile = tl.load(ptrs + k, eviction_policy=policy)
    else:
        tile = tl.load(ptrs + k, mask=k + col < depth, other=0.0, eviction_policy=policy)
    return tile


@triton.jit
def _add_products(
    acc: tl.tensor,  # [M, N, K]
    squares: tl.tensor,  # [M, 1, K]
    w: tl.tensor,  # [1, N, K]
    x_ptrs: tl.tensor,  # [M, 1, K]
    norm_ptrs: tl.tensor,  # [1, 1, K] or None
    offset: tl.tensor,
    col: tl.tensor,
    k: tl.tensor,
    depth: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """acc + x * w, and squares + x * x, element by element: what crosses threads is left for the end."""
    x = _load(x_ptrs, col, k, depth, even, "").to(tl.float32)
    if norm_ptrs is not None:
        squares += x * x
        x *= _load(norm_ptrs, col, k, depth, even, "").to(tl.float32) + offset
    return acc + x * w.to(tl.float32), squares


@triton.jit
def _gemv_kernel(
    x_ptr: tl.tensor,  # [M, K]
    weight_ptr: tl.tensor,  # [N, K]; gated: [2N, K]
    bias_ptr: tl.tensor,  # [N] or [2N], or None
    norm_ptr: tl.tensor,  # [K] or None
    add_ptr: tl.tensor,  # [M, N] or None
    out_ptr: tl.tensor,  # [M, N]
    outputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    add_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    weight_offset: tl.tensor,
    rows: tl.constexpr,
    depth: tl.constexpr,
    activation: tl.constexpr,
    pdl: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    # Tiles are [M, N, K]; a gated tile holds gate and up rows in turn. Beyond the last row lies the last row again.
    tile_n: tl.constexpr = block_n if activation is None else 2 * block_n
    even: tl.constexpr = depth % block_k == 0
    last: tl.constexpr = (depth - 1) // block_k * block_k  # where the last tile begins
    first = tl.program_id(0) * block_n
    lane = tl.arange(0, tile_n)
    if activation is None:
        row = tl.minimum(first + lane, outputs - 1)
    else:
        row = tl.minimum(first + lane // 2, outputs - 1) + lane % 2 * outputs
    col = tl.arange(0, block_k)[None, None, :]
    m = tl.minimum(tl.arange(0, block_m), rows - 1).to(tl.int64)
    weight_ptrs = weight_ptr + row.to(tl.int64)[None, :, None] * weight_stride + col
    x_ptrs = x_ptr + m[:, None, None] * x_stride + col
    norm_ptrs = None if norm_ptr is None else norm_ptr + col

    # The first weights are under way before the wait: the kernel in front writes x and add, never weights. Behind it,
    # the next kernel may start as soon as there is room, to do the same.
    w = _load(weight_ptrs, col, 0, depth, even, "evict_first")
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([block_m, tile_n, block_k], tl.float32)
    squares = tl.zeros([block_m, 1, block_k], tl.float32)
    if stages == 1:  # the next tile is under way to registers while one is used
        for k in range(0, last, block_k):
            ahead = _load(weight_ptrs, col, k + block_k, depth, even, "evict_first")
            acc, squares = _add_products(acc, squares, w, x_ptrs, norm_ptrs, weight_offset, col, k, depth, True)
            w = ahead
        acc, squares = _add_products(acc, squares, w, x_ptrs, norm_ptrs, weight_offset, col, last, depth, even)
    else:  # `stages` tiles are under way to shared memory
        acc, squares = _add_products(acc, squares, w, x_ptrs, norm_ptrs, weight_offset, col, 0, depth, even)
        for k in tl.range(block_k, depth, block_k, num_stages=stages):
            w = _load(weight_ptrs, col, k, depth, even, "evict_first")
            acc, squares = _add_products(acc, squares, w, x_ptrs, norm_ptrs, weight_offset, col, k, depth, even)

    y = tl.sum(acc, axis=2)  # [M, N]
    if norm_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares, axis=2) / depth + eps)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if activation is not None:
        gate, up = tl.split(tl.reshape(y, [block_m, block_n, 2]))
        y = activate(gate, activation) * up
    at = tl.arange(0, block_m)[:, None].to(tl.int64)
    n = first + tl.arange(0, block_n)[None, :]
    mask = (at < rows) & (n < outputs)
    if add_ptr is not None:
        y += tl.load(add_ptr + at * add_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at * out_stride + n, y.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tiles of one row times a weight, and whether the kernel begins while the one in front ends."""

    block_n: int
    block_k: int
    num_warps: int
    overlaps: bool = True


OF_RANKS: Mapping[tuple[int, int], _Tile] = {
    (3072, 4096): _Tile(2, 2048, 4), (1536, 4096): _Tile(2, 2048, 4), (768, 4096): _Tile(4, 4096, 8),
    (4096, 2048): _Tile(2, 1024, 1), (4096, 1024): _Tile(4, 512, 2), (4096, 512): _Tile(4, 512, 2),
    (4096, 7168): _Tile(1, 1024, 4), (4096, 3584): _Tile(1, 512, 2), (16032, 4096): _Tile(4, 4096, 8, overlaps=False),
    (2560, 8192): _Tile(4, 1024, 4), (1280, 8192): _Tile(4, 4096, 8, overlaps=False),
    (8192, 2048): _Tile(2, 1024, 1), (8192, 1024): _Tile(4, 512, 2), (8192, 7168): _Tile(1, 1024, 4),
    (8192, 3584): _Tile(1, 512, 1), (32064, 8192): _Tile(4, 1024, 4, overlaps=False),
    (16032, 8192): _Tile(4, 4096, 8, overlaps=False),
}  # fmt: skip
"""(outputs, depth) of a rank of Llama-3.1-8B over 2, 4, 8 ranks and of 70B over 4, 8, as measured on an H200."""
GATED_OF_RANKS: Mapping[tuple[int, int], _Tile] = {(1792, 4096): _Tile(1, 2048, 4), (3584, 8192): _Tile(2, 1024, 4)}


def _measured(rows: int, outputs: int, depth: int, gated: bool) -> _Tile | None:
    return (GATED_OF_RANKS if gated else OF_RANKS).get((outputs, depth)) if rows == 1 else None


def gemv_config(rows: int, outputs: int, depth: int, gated: bool = False) -> dict[str, int]:
    """Tiles that a sweep over the layers of Llama-3.1-8B, 3.2-1B and Qwen3-0.6B on an H200 chose, or one over ranks."""
    if (found := _measured(rows, outputs, depth, gated)) is not None:
        return {"block_n": found.block_n, "block_k": found.block_k, "num_warps": found.num_warps, "num_stages": 1}
    width: int = triton.next_power_of_2(depth)
    if rows > 1:
        tile = (2 if rows <= 2 else 1, min(512, width), 1)
    elif gated:
        tile = (2, min(4096, width), 8 if depth > 1024 else 2)
    elif outputs >= 65536:
        tile = (4, min(2048, width), 4 if depth > 1024 else 2)
    elif depth >= 8192:
        tile = (1, 256, 1) if depth > 8192 else (1, 512, 2)
    elif depth >= 2048 and (2 * outputs >= 3 * depth or outputs * depth >= 2**24):
        tile = (4, 2048, 4)
    elif outputs <= 2048:
        tile = (1 if depth <= 2048 else 2, min(1024, width), 4 if outputs <= 1024 else 1)
    else:
        tile = (2, min(1024, width), 1)
    return {"block_n": tile[0], "block_k": tile[1], "num_warps": tile[2], "num_stages": 1}


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels of this device can start before the one in front has ended (Hopper and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def row_stride(x: Tensor | None) -> int:
    """Distance of the rows of x; 0 where there is but one, so that its stride makes no new variant of the kernel."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    shape: tuple[int, int],
    *likes: Tensor | None,
) -> None:
    """What the kernel relies on in shapes, dtypes and strides; likes have the shape of the output."""
    (rows, depth), dtype = x.shape, x.dtype
    assert rows <= MAX_ROWS, f"{rows} rows are more than {MAX_ROWS}"
    assert (weight.shape[1], weight.dtype) == (depth, dtype), (x.shape, dtype, weight.shape, weight.dtype)
    assert depth > 0, "rows of no width"
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    assert norm_weight is None or (norm_weight.shape == x.shape[1:] and norm_weight.is_contiguous())
    assert all(t is None or (t.shape, t.dtype) == (shape, dtype) for t in likes), f"neither {shape} nor {dtype}"
    assert all(t is None or t.shape[1] == 1 or t.stride(1) == 1 for t in (x, weight, *likes)), "rows must be contiguous"


def gemv_triton(
    x: Tensor,
    weight: Tensor,
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
    """gemv_ref in one kernel, rounded once: round_before_weight changes nothing here. out may be add, never x.

    pdl overlaps the start with the end of the kernel in front, which must not be one that writes weight, bias or
    norm_weight; it is ignored where the device cannot. None: where it measures faster, which is without norm and gate
    (8B's o: 9.3 us against 9.7; its gate_up: 61 against 56) but for small weights (see OF_RANKS).
    """
    rows, depth = x.shape
    assert activation is None or weight.shape[0] % 2 == 0, f"{weight.shape[0]} rows have no two halves"
    outputs = weight.shape[0] // (1 if activation is None else 2)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    _check(x, weight, bias, norm_weight, (rows, outputs), add, out)
    if out.numel() == 0:
        return out
    meta = {**gemv_config(rows, outputs, depth, activation is not None), **(config or {})}
    if pdl is None:
        found = _measured(rows, outputs, depth, activation is not None)
        pdl = activation is None and norm_weight is None if found is None else found.overlaps
    pdl = pdl and has_pdl(x.device)
    _gemv_kernel[(triton.cdiv(outputs, meta["block_n"]),)](
        *(x, weight, bias, norm_weight, add, out, outputs),
        *(row_stride(x), weight.stride(0), row_stride(add), row_stride(out), eps, weight_offset),
        rows=rows,
        depth=depth,
        activation=None if activation is None else activation_kind(activation),
        pdl=pdl,
        block_m=triton.next_power_of_2(rows),
        stages=meta["num_stages"],
        **meta,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
