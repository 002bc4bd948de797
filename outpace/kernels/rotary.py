"""Rotary positions of queries and keys, after their per-head norm; then the write of keys and values to pages."""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.kernels.kv_quant import check_page_scales, quantize, scale_of, stored, write_tokens
from outpace.kernels.launch_options import few_overlap, pdl_options
from outpace.kernels.rms_norm import rms_norm_torch, scale_normed
from outpace.kernels.triton_stub import tl, triton

QKV = Tensor | tuple[Tensor, Tensor, Tensor]


def split_qkv(qkv: QKV, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] of a fused row or of three parts (2-D or 3-D)."""
    if isinstance(qkv, Tensor):
        q_width, k_width = num_heads * head_dim, num_kv_heads * head_dim
        qkv = (qkv[:, :q_width], qkv[:, q_width : q_width + k_width], qkv[:, q_width + k_width :])
    q, k, v = (
        part if part.dim() == 3 else part.view(part.shape[0], heads, part.shape[1] // heads)
        for part, heads in zip(qkv, (num_heads, num_kv_heads, num_kv_heads), strict=True)
    )
    assert (q.shape[1:], k.shape[1:]) == ((num_heads, head_dim), (num_kv_heads, head_dim))
    return q, k, v


def _heads(qkv: Tensor, heads: int, head_dim: int) -> Tensor:
    """The first heads of a fused row: a view [T, heads, D]."""
    return qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))


def _pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two columns of each rotated pair: x [T, N, D] → two views [T, N, R/2]."""
    half = rotary_dim // 2
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., :half], x[..., half:rotary_dim]


class Rope(NamedTuple):
    """Norm, rotate q and k in place and write k, v to pages: the arguments of both implementations.

    They return the views q, k, v.
    """

    qkv: QKV
    cos: Tensor | None
    """fp32 [P, R/2], as sin; None: nothing is rotated."""
    sin: Tensor | None
    positions: Tensor | None
    """[T]"""
    slots: Tensor | None
    """[T], distinct; -1: nothing is written."""
    k_pages: Tensor | None
    """[N, bs, Hkv, D]"""
    v_pages: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    """A pair is two adjacent columns, not one column of each half."""
    q_norm_weight: Tensor | None = None
    k_norm_weight: Tensor | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0
    round_before_weight: bool = True
    scales: Tensor | None = None
    """[N, 2, Hkv, bs]: the pages are int8 or fp8, and keys and values are quantized (see `kv_quant`)."""

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `split_qkv`."""
        return split_qkv(self.qkv, self.num_heads, self.num_kv_heads, self.head_dim)

    def check(self) -> None:
        """Assert that fields which need each other are given."""
        if self.cos is not None:
            assert self.sin is not None, "cos without sin"
            assert self.positions is not None, "a rotation needs positions"
            assert 2 * self.cos.shape[1] == self.rotary_dim <= self.head_dim
        if self.k_pages is not None:
            assert self.v_pages is not None, "k_pages without v_pages"
            assert self.slots is not None, "a write to pages needs slots"

    def check_layout(self, k: Tensor, v: Tensor) -> None:
        """Assert the layout too that the kernel relies on."""
        self.check()
        cos, sin, k_pages, v_pages = self.cos, self.sin, self.k_pages, self.v_pages
        if cos is not None and sin is not None:
            assert (cos.shape, cos.stride()) == (sin.shape, sin.stride())
            assert cos.dtype == sin.dtype == torch.float32
            assert cos.stride(1) == 1
        if k_pages is not None and v_pages is not None:
            assert k_pages.shape[1:] == (v_pages.shape[1], self.num_kv_heads, self.head_dim)
            assert v_pages.shape[2:] == v.shape[1:]
            if self.scales is None:
                assert k_pages.dtype == v_pages.dtype == k.dtype
            else:
                check_page_scales(k_pages, v_pages, self.scales)
        used = (self.positions if cos is not None else None, self.slots if k_pages is not None else None)
        assert all(t is None or t.is_contiguous() for t in used)
        weights = self.q_norm_weight, self.k_norm_weight
        assert all(w is None or (w.shape == (self.head_dim,) and w.is_contiguous()) for w in weights)


def rope_and_cache_torch(*operands: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A `Rope` by torch."""
    rope = Rope(*operands, **options)
    rope.check()
    q, k, v = rope.split()
    for x, weight in ((q, rope.q_norm_weight), (k, rope.k_norm_weight)):
        if weight is not None:
            style: dict[str, Any] = {
                "weight_offset": rope.weight_offset,
                "round_before_weight": rope.round_before_weight,
            }
            rms_norm_torch(x, weight, rope.eps, out=x, **style)
    if rope.cos is not None and rope.sin is not None and rope.positions is not None:
        cos, sin = (table.index_select(0, rope.positions)[:, None] for table in (rope.cos, rope.sin))  # [T, 1, R/2]
        if isinstance(rope.qkv, Tensor):  # queries and keys lie side by side
            turn: tuple[Tensor, ...] = (_heads(rope.qkv, rope.num_heads + rope.num_kv_heads, rope.head_dim),)
        else:
            turn = (q, k)
        for x in turn:
            a, b = _pairs(x, rope.rotary_dim, rope.interleaved)
            turned = a.float() * cos - b.float() * sin, b.float() * cos + a.float() * sin
            a.copy_(turned[0])
            b.copy_(turned[1])
    if rope.k_pages is not None and rope.v_pages is not None and rope.slots is not None:
        _write(k, v, rope.slots, rope.k_pages, rope.v_pages, rope.scales)
    return q, k, v


def _write(k: Tensor, v: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, scales: Tensor | None) -> None:
    """Keys and values to their slots."""
    if len(slots) == 1 and scales is None and not slots.is_cuda:
        _write_one(k, v, int(slots), k_pages, v_pages)
        return
    rows = (slots >= 0).nonzero().squeeze(1)
    page, offset = slots[rows] // k_pages.shape[1], slots[rows] % k_pages.shape[1]
    for x, to in zip((k, v), stored(k_pages, v_pages, scales), strict=True):
        write_tokens(x[rows], to.pages, page, offset, to.scales)


def _write_one(k: Tensor, v: Tensor, slot: int, k_pages: Tensor, v_pages: Tensor) -> None:
    """One token on a CPU: its place is a Python int, and no tensor is used as an index."""
    if slot >= 0:
        page, offset = divmod(slot, k_pages.shape[1])
        k_pages[page, offset].copy_(k[0])
        v_pages[page, offset].copy_(v[0])


@triton.jit
def _rope_heads(
    x_ptr: tl.tensor, x_stride: tl.tensor, out_ptr: tl.tensor, out_stride: tl.tensor, page_ptr: tl.tensor,
    page_stride: tl.tensor, page_heads: tl.tensor, scale_ptr: tl.tensor,
    page_size: tl.constexpr,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, weight_ptr: tl.tensor, eps: tl.tensor, weight_offset: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, interleaved: tl.constexpr,
    round_first: tl.constexpr, heads: tl.constexpr, block_pair: tl.constexpr, block_rest: tl.constexpr,
) -> None:  # fmt: skip
    """Norms and rotates `heads` heads of one token. A head is two halves that turn [R/2] and a rest that does not."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    head = (first_head + tl.arange(0, heads)).to(tl.int64)[:, None]  # [N, 1]
    live = head < num_heads
    paged = head < page_heads  # none where the token has no slot
    squares = tl.zeros([heads], tl.float32)
    if rotary_dim > 0:
        pair = tl.arange(0, block_pair)[None, :]  # [1, R/2]
        a_col = 2 * pair if interleaved else pair
        b_col = a_col + (1 if interleaved else rotary_dim // 2)
        turns = pair < rotary_dim // 2
        a = tl.load(x_ptr + head * x_stride + a_col, mask=live & turns, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + head * x_stride + b_col, mask=live & turns, other=0.0).to(tl.float32)
        squares += tl.sum(a * a + b * b, axis=1)
    if rotary_dim < head_dim:
        c_col = rotary_dim + tl.arange(0, block_rest)[None, :]  # [1, D - R]
        rests = c_col < head_dim
        c = tl.load(x_ptr + head * x_stride + c_col, mask=live & rests, other=0.0).to(tl.float32)
        squares += tl.sum(c * c, axis=1)

    scale = tl.rsqrt(squares / head_dim + eps)[:, None]  # [N, 1]
    largest = tl.zeros([heads], tl.float32)
    if rotary_dim > 0:
        if weight_ptr is not None:
            a_weight = tl.load(weight_ptr + a_col, mask=turns, other=0.0)
            b_weight = tl.load(weight_ptr + b_col, mask=turns, other=0.0)
            a = scale_normed(a * scale, a_weight, weight_offset, dtype, round_first).to(tl.float32)
            b = scale_normed(b * scale, b_weight, weight_offset, dtype, round_first).to(tl.float32)
        cos = tl.load(cos_ptr + pair, mask=turns, other=0.0)
        sin = tl.load(sin_ptr + pair, mask=turns, other=0.0)
        a_turned = (a * cos - b * sin).to(dtype)
        b_turned = (b * cos + a * sin).to(dtype)
        tl.store(out_ptr + head * out_stride + a_col, a_turned, mask=live & turns)
        tl.store(out_ptr + head * out_stride + b_col, b_turned, mask=live & turns)
        if scale_ptr is not None:
            a_stored = a_turned.to(tl.float32)
            b_stored = b_turned.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(a_stored), tl.abs(b_stored)), axis=1))
        elif page_ptr is not None:
            tl.store(page_ptr + head * page_stride + a_col, a_turned, mask=paged & turns)
            tl.store(page_ptr + head * page_stride + b_col, b_turned, mask=paged & turns)
    if rotary_dim < head_dim:
        if weight_ptr is not None:
            c_weight = tl.load(weight_ptr + c_col, mask=rests, other=0.0)
            c = scale_normed(c * scale, c_weight, weight_offset, dtype, round_first)
        tl.store(out_ptr + head * out_stride + c_col, c.to(dtype), mask=live & rests)
        if scale_ptr is not None:
            c_stored = c.to(dtype).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(c_stored), axis=1))
        elif page_ptr is not None:
            tl.store(page_ptr + head * page_stride + c_col, c.to(dtype), mask=paged & rests)

    if scale_ptr is not None:
        page_type: tl.constexpr = page_ptr.dtype.element_ty
        page_scale = scale_of(largest, page_type)[:, None]  # [N, 1]
        tl.store(scale_ptr + head * page_size, page_scale, mask=paged)
        if rotary_dim > 0:
            pairs_scale = tl.broadcast_to(page_scale, [heads, block_pair])
            tl.store(page_ptr + head * page_stride + a_col, quantize(a_stored, pairs_scale, page_type), paged & turns)
            tl.store(page_ptr + head * page_stride + b_col, quantize(b_stored, pairs_scale, page_type), paged & turns)
        if rotary_dim < head_dim:
            rest_scale = tl.broadcast_to(page_scale, [heads, block_rest])
            tl.store(page_ptr + head * page_stride + c_col, quantize(c_stored, rest_scale, page_type), paged & rests)


@triton.jit
def _rope_and_cache_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, q_out_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, positions_ptr: tl.tensor, slots_ptr: tl.tensor, k_pages_ptr: tl.tensor,
    v_pages_ptr: tl.tensor, scales_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor,
    q_token: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor,
    v_head: tl.tensor, q_out_token: tl.tensor, q_out_head: tl.tensor, table_stride: tl.tensor,
    k_page: tl.tensor, k_offset: tl.tensor, k_page_head: tl.tensor, v_page: tl.tensor, v_offset: tl.tensor,
    v_page_head: tl.tensor, s_page: tl.tensor, eps: tl.tensor, weight_offset: tl.tensor,
    page_size: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    v_dim: tl.constexpr, rotary_dim: tl.constexpr, interleaved: tl.constexpr, round_first: tl.constexpr,
    q_parts: tl.constexpr, k_parts: tl.constexpr, heads: tl.constexpr, block_pair: tl.constexpr,
    block_rest: tl.constexpr, block_v: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # q_parts programs of `heads` query heads, then k_parts of key heads, then of value heads
    cos_row = cos_ptr
    sin_row = sin_ptr
    if rotary_dim > 0:
        position = tl.load(positions_ptr + token).to(tl.int64)
        cos_row = cos_ptr + position * table_stride
        sin_row = sin_ptr + position * table_stride
    page_heads = 0
    k_row = k_pages_ptr
    v_row = v_pages_ptr
    s_row = scales_ptr
    if k_pages_ptr is not None:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        page_heads = tl.where(slot >= 0, num_kv_heads, 0)
        k_row = k_pages_ptr + (slot // page_size) * k_page + (slot % page_size) * k_offset
        v_row = v_pages_ptr + (slot // page_size) * v_page + (slot % page_size) * v_offset
        if scales_ptr is not None:
            s_row = scales_ptr + (slot // page_size) * s_page + slot % page_size  # of the key of head 0

    if part < q_parts:
        q = q_ptr + token * q_token
        q_out = q_out_ptr + token * q_out_token
        _rope_heads(
            q, q_head, q_out, q_out_head, None, 0, 0, None, 1, cos_row, sin_row, q_weight_ptr, eps, weight_offset,
            part * heads, num_heads, head_dim, rotary_dim, interleaved, round_first, heads, block_pair, block_rest,
        )  # fmt: skip
    elif part < q_parts + k_parts:
        k = k_ptr + token * k_token
        _rope_heads(
            k, k_head, k, k_head, k_row, k_page_head, page_heads, s_row, page_size, cos_row, sin_row, k_weight_ptr,
            eps, weight_offset, (part - q_parts) * heads, num_kv_heads, head_dim, rotary_dim, interleaved, round_first,
            heads, block_pair, block_rest,
        )  # fmt: skip
    elif v_pages_ptr is not None:
        head = ((part - q_parts - k_parts) * heads + tl.arange(0, heads)).to(tl.int64)[:, None]  # [N, 1]
        col = tl.arange(0, block_v)[None, :]  # [1, Dv]
        mask = (head < page_heads) & (col < v_dim)
        if scales_ptr is None:
            v = tl.load(v_ptr + token * v_token + head * v_head + col, mask=mask)
        else:
            x = tl.load(v_ptr + token * v_token + head * v_head + col, mask=mask, other=0.0).to(tl.float32)
            v_type: tl.constexpr = v_pages_ptr.dtype.element_ty
            v_scale = scale_of(tl.max(tl.abs(x), axis=1), v_type)[:, None]  # [N, 1]
            tl.store(s_row + (num_kv_heads + head) * page_size, v_scale, mask=head < page_heads)
            v = quantize(x, tl.broadcast_to(v_scale, [heads, block_v]), v_type)
        tl.store(v_row + head * v_page_head + col, v, mask=mask)


def rope_config(head_dim: int) -> dict[str, int]:
    """Tile of the rotary kernel: heads of one token, about 1024 numbers per program."""
    return {"heads": max(1, 1024 // triton.next_power_of_2(head_dim)), "num_warps": 4}


def _page_strides(pages: Tensor | None) -> tuple[int, int, int]:
    assert pages is None or pages.stride(3) == 1, "heads in a page must be contiguous"
    return (0, 0, 0) if pages is None else (pages.stride(0), pages.stride(1), pages.stride(2))


def _token_strides(x: Tensor) -> tuple[int, int]:
    assert x.stride(2) == 1, "heads must be contiguous"
    return x.stride(0), x.stride(1)


def rope_and_cache_triton(
    *operands: Any, config: Mapping[str, int] | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """A `Rope` in one kernel."""
    rope = Rope(*operands, **options)
    q, k, v = rope.split()
    rope.check_layout(k, v)
    cos, k_pages, v_pages, scales, head_dim = rope.cos, rope.k_pages, rope.v_pages, rope.scales, rope.head_dim
    num_tokens, v_dim, turned = q.shape[0], v.shape[2], 0 if cos is None else rope.rotary_dim
    meta = {**rope_config(head_dim), **(config or {})}
    q_work = cos is not None or rope.q_norm_weight is not None
    k_work = cos is not None or rope.k_norm_weight is not None or k_pages is not None
    q_parts = triton.cdiv(rope.num_heads, meta["heads"]) if q_work else 0
    k_parts = triton.cdiv(rope.num_kv_heads, meta["heads"]) if k_work else 0
    v_parts = 0 if k_pages is None else k_parts
    grid = (num_tokens, q_parts + k_parts + v_parts)
    if 0 in grid:
        return q, k, v
    _rope_and_cache_kernel[grid](
        *(q, k, v, q, cos, rope.sin, None if cos is None else rope.positions, None if k_pages is None else rope.slots),
        *(k_pages, v_pages, scales, rope.q_norm_weight, rope.k_norm_weight),
        *(*_token_strides(q), *_token_strides(k), *_token_strides(v), *_token_strides(q)),
        *(0 if cos is None else cos.stride(0), *_page_strides(k_pages), *_page_strides(v_pages)),
        *(0 if scales is None else scales.stride(0), rope.eps, rope.weight_offset),
        page_size=1 if k_pages is None else k_pages.shape[1],
        num_heads=rope.num_heads,
        num_kv_heads=rope.num_kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        rotary_dim=turned,
        interleaved=rope.interleaved,
        round_first=rope.round_before_weight,
        q_parts=q_parts,
        k_parts=k_parts,
        block_pair=triton.next_power_of_2(max(1, turned // 2)),
        block_rest=triton.next_power_of_2(max(1, head_dim - turned)),
        block_v=triton.next_power_of_2(v_dim),
        **meta,
        **pdl_options(cos is not None and few_overlap(num_tokens, q)),
    )
    return q, k, v
