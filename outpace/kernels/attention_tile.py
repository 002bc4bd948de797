"""Code that the attention kernels share: the softmax over key tiles in pages, and the compile-time constants.

Scores are kept in log2 units: `exp2` then needs no factor.
"""
# mypy: disallow-untyped-decorators=False

import math
from typing import NamedTuple

from torch import Tensor

from outpace.kernels.kv_quant import as_numbers, two_values
from outpace.kernels.triton_stub import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that a row that has seen no key yet never computes inf - inf


class Scoring(NamedTuple):
    """How scores are computed."""

    scale: float
    window: int = 0
    """Keys a query sees, itself included; 0: all."""
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    """One for each head."""
    sinks: Tensor | None = None
    """A logit for each head that takes probability but adds no value."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention can compute it."""
        return self.softcap == 0 and self.alibi_slopes is None and self.sinks is None

    def first_seen(self, length: int) -> int:
        """The first key that the last token of a sequence of this length sees."""
        return max(0, length - self.window) if self.window else 0

    def capped(self, scores: Tensor) -> Tensor:
        """Scores under the cap, in place."""
        return scores.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap > 0 else scores

    @property
    def in_log2(self) -> tuple[float, float]:
        """The scale and the cap that `shape_scores` takes."""
        log2e = math.log2(math.e)
        if self.softcap > 0:
            return 2.0 * log2e * self.scale / self.softcap, log2e * self.softcap
        return log2e * self.scale, 0.0


def kernel_constants(q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, scales: Tensor | None) -> dict[str, int]:
    """The compile-time constants of both kernels: strides and sizes, so that the compiler sees every alignment."""
    assert q.stride(2) == k_pages.stride(3) == v_pages.stride(3) == out.stride(2) == 1
    names = ("q_row", "q_head", "out_row", "out_head", "k_page", "k_row", "k_head", "v_page", "v_row", "v_head")
    strides = (*q.stride()[:2], *out.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3])
    dim, v_dim = k_pages.shape[3], v_pages.shape[3]
    return dict(zip(names, strides, strict=True)) | {
        "dim": dim,
        "v_dim": v_dim,
        "block_d": max(16, triton.next_power_of_2(dim)),
        "block_dv": max(16, triton.next_power_of_2(v_dim)),
        "page_size": k_pages.shape[1],
        "group": q.shape[1] // k_pages.shape[2],
        "s_page": 0 if scales is None else scales.stride(0),
        "s_value": 0 if scales is None else scales.stride(1),
    }


@triton.jit
def shape_scores(
    s: tl.tensor, distance: tl.tensor, slopes: tl.tensor, scale: tl.tensor, cap: tl.tensor, has_cap: tl.constexpr
) -> tl.tensor:
    """Raw q·k to log2 units: scale, cap c (`scale` is then 2·log2e·scale/c and `cap` c·log2e), bias. s: [M, N]."""
    s = s * scale
    if has_cap:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s))  # c * tanh(x) = c - 2c / (1 + exp(2x))
    if slopes is not None:
        s += slopes[:, None] * distance
    return s


@triton.jit
def add_scores(
    acc: tl.tensor,  # [M, Dv]
    m_i: tl.tensor,  # [M]
    l_i: tl.tensor,  # [M]
    s: tl.tensor,  # [M, N], shaped and masked; when plain: only masked
    v: tl.tensor,  # [N, Dv]
    scale: tl.tensor,
    plain: tl.constexpr,
) -> tl.tensor:
    """Add a tile to a running softmax. Plain scores are scaled here, in the same instruction as the maximum."""
    if plain:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def _load_rows(
    ptr: tl.tensor, at: tl.tensor, exists: tl.tensor, dim: tl.constexpr, block: tl.constexpr, masked: tl.constexpr
) -> tl.tensor:
    """Rows of `dim` elements, padded to `block` with zeros; zeros also for rows that do not exist. [N, block]."""
    d = tl.arange(0, block)
    ptrs = ptr + at[:, None] + d[None, :]
    if masked:
        rows = tl.load(ptrs, mask=exists[:, None] & (d < dim)[None, :], other=0.0)
    elif dim < block:
        rows = tl.load(ptrs, mask=(d < dim)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def attend(
    acc: tl.tensor,  # [M, Dv]
    m_i: tl.tensor,  # [M]
    l_i: tl.tensor,  # [M]
    q: tl.tensor,  # [M, D]
    pos: tl.tensor,  # [M]: the position of each row's query
    slopes: tl.tensor,  # [M] or None
    k_ptr: tl.tensor, v_ptr: tl.tensor,
    s_ptr: tl.tensor,  # scales of quantized keys and values, or None
    table_ptr: tl.tensor,
    first: tl.tensor,  # keys from first to last are seen by some row
    last: tl.tensor,
    begin: tl.tensor,  # tiles from begin to end are to be added
    end: tl.tensor, window: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    k_page: tl.constexpr, k_row: tl.constexpr, v_page: tl.constexpr, v_row: tl.constexpr,
    s_page: tl.constexpr, s_value: tl.constexpr, dim: tl.constexpr, v_dim: tl.constexpr,
    page_size: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    has_window: tl.constexpr, has_cap: tl.constexpr, masked: tl.constexpr, paired: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add key tiles to a running softmax. Unless `masked`, every row sees every key of these tiles.

    Quantized keys and values are multiplied as they are stored; the scale of a key goes to its scores, the scale of a
    value to its probabilities. These are then bf16, unless q is fp32: the product with a small scale would be a
    denormal fp16. `paired`: values are read in pairs, and products are of fp16, which takes half of the instructions;
    rows of q and of probabilities are divided by their largest number, so that fp16 holds them.
    """
    n = begin * block_n + tl.arange(0, block_n)  # key positions
    exists = (n >= first) & (n < last)
    page = tl.load(table_ptr + n // page_size, mask=exists, other=0).to(tl.int64)
    if paired:
        exact: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        q_size = tl.max(tl.where(q == q, tl.abs(q.to(tl.float32)), 0.0), 1)  # a row of padding may be NaN
        q_size = tl.where(q_size > 0.0, q_size, 1.0)
        q = (q.to(tl.float32) / q_size[:, None]).to(exact)
        even, odd = tl.split(tl.reshape(acc, [acc.shape[0], block_dv // 2, 2]))
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    for _ in range(begin, end):
        k = _load_rows(k_ptr, page * k_page + n % page_size * k_row, exists, dim, block_d, masked)
        if paired:
            at = page * (v_page // 2) + n % page_size * (v_row // 2)
            pairs = _load_rows(v_ptr, at, exists, v_dim // 2, block_dv // 2, masked)
        else:
            v = _load_rows(v_ptr, page * v_page + n % page_size * v_row, exists, v_dim, block_dv, masked)
        if s_ptr is not None:
            s_at = s_ptr + page * s_page + n % page_size
            if masked:
                k_scale = tl.load(s_at, mask=exists, other=0.0)
                v_scale = tl.load(s_at + s_value, mask=exists, other=0.0)
            else:
                k_scale = tl.load(s_at)
                v_scale = tl.load(s_at + s_value)
            k = as_numbers(k, q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        if paired:
            s = s * (k_scale[None, :] * q_size[:, None])
        elif s_ptr is not None:
            s = s * k_scale[None, :]
        plain: tl.constexpr = s_ptr is None and slopes is None and not has_cap
        if not plain:
            s = shape_scores(s, n[None, :] - pos[:, None], slopes, scale, cap, has_cap)
        if masked:
            sees = n[None, :] <= pos[:, None]
            if has_window:
                sees = sees & (n[None, :] > pos[:, None] - window)
            s = tl.where(sees, s, float("-inf"))
        if s_ptr is None:
            acc, m_i, l_i = add_scores(acc, m_i, l_i, s, v, scale, plain)
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            p = p * v_scale[None, :]
            if paired:
                largest = tl.maximum(tl.max(p, 1), 1e-37)[:, None]  # of each row: no row depends on another
                p = (p / largest).to(exact)
                low, high = two_values(pairs, k_ptr.dtype.element_ty == tl.int8, exact)
                even = even * alpha[:, None] + tl.dot(p, low, input_precision="ieee") * largest
                odd = odd * alpha[:, None] + tl.dot(p, high, input_precision="ieee") * largest
            else:
                v = v.to(tl.float32 if q.dtype == tl.float32 else tl.bfloat16)  # late: fewer registers
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new
        n += block_n
        exists = (n >= first) & (n < last)
        # one step ahead: the pipeliner refuses two
        page = tl.load(table_ptr + n // page_size, mask=exists, other=0).to(tl.int64)
    if paired:
        acc = tl.reshape(tl.join(even, odd), [acc.shape[0], block_dv])
    return acc, m_i, l_i
