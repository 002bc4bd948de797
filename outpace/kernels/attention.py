"""Attention of ragged batches over paged keys and values: the torch reference, and which kernel runs which shape."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.attention_by_page import attend_by_page
from outpace.kernels.attention_decode import paged_attention_decode
from outpace.kernels.attention_prefill import paged_attention_prefill
from outpace.kernels.kv_quant import Stored, check_scales, stored
from outpace.kernels.triton_stub import HAS_TRITON

SCORE_BYTES = 256 << 20  # the largest score tensor the reference makes
KV_BYTES = 8 << 20  # keys and values it copies at a time where it can (8 decodes over 1,000 keys: 8.8 ms, at once 11.0)
INVARIANT_ROWS = 16  # queries x heads of one KV head in an invariant product, at most; a lone query wastes the others
FEW_DECODES = 16  # are as fast padded together as page by page
PIECE_COST = 1 << 14  # what one more piece costs, in units of `_pieces`


def paged_attention_ref(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    mixed: bool = False,
    invariant: bool = False,
) -> Tensor:
    """`paged_attention` in torch; KV heads are never repeated. `mixed` is for the kernels: lengths are read here.

    Sequences of like lengths are padded together. But on one thread single queries go one after another, and on more
    threads, if they are many, page by page: 32 (128) of them, 9/3 heads of 64 over 50 to 500 keys, take 2.8 (11.3) ms
    on one thread and 2.4 (7.9) on two; padded together 3.9 (15.4) and 2.7 (10.2).
    """
    keys, values = stored(k_pages, v_pages, scales)
    plain = softcap == 0 and alibi_slopes is None and sinks is None and q.dtype == torch.float32 and not invariant
    if plain and len(q) == len(seq_lens) == 1 and int(cu_q[1]) == 1 and int(seq_lens[0]) > 0:
        return _one_token(q, keys, values, block_table[0], int(seq_lens[0]), scale, window, out)
    shape = (*q.shape[:2], v_pages.shape[3])
    out = q.new_zeros(shape) if out is None else out.zero_()
    options = (scale, window, softcap, alibi_slopes, sinks, out)
    lens, starts, q_lens = seq_lens.long(), cu_q[:-1].long(), cu_q.diff().long()

    def attend(function: Callable[..., None], seqs: Tensor) -> None:
        if len(seqs):
            some = (block_table[seqs], lens[seqs], starts[seqs], q_lens[seqs])
            function(q, keys, values, *some, *options)

    alive = (q_lens > 0) & (lens > 0)
    if invariant:
        block = max(1, INVARIANT_ROWS * k_pages.shape[2] // q.shape[1])
        attend(partial(attend_by_page, block), torch.nonzero(alive).squeeze(1))
        return out
    single, one_thread = torch.nonzero(alive & (q_lens == 1)).squeeze(1), torch.get_num_threads() == 1
    if one_thread or len(single) > FEW_DECODES:
        attend(_attend_singly if one_thread else partial(attend_by_page, 1), single)
        alive &= q_lens > 1
    live = torch.nonzero(alive).squeeze(1)
    live = live[(q_lens[live] * (1 + block_table.shape[1] * k_pages.shape[1]) + lens[live]).argsort()]
    key_bytes = 4 * k_pages.shape[2] * (k_pages.shape[3] + v_pages.shape[3])
    for piece in _pieces(q_lens[live], lens[live], 4 * q.shape[1], key_bytes):
        attend(_attend, live[piece])
    return out


def _one_token(
    q: Tensor,
    k_pages: Stored,
    v_pages: Stored,
    table: Tensor,
    length: int,
    scale: float,
    window: int,
    out: Tensor | None,
) -> Tensor:
    """One query of one sequence: nothing to sort, pad or mask. 0.09 ms against 0.41 for 9/3 heads of 64 on 2 cores."""
    size = k_pages.shape[1]
    start = max(0, length - window) if window else 0
    first = start // size
    pages = table[first : (length - 1) // size + 1]
    k, v = (
        part.run(pages, q.dtype).flatten(0, 1)[start - first * size : length - first * size].transpose(0, 1)[None]
        for part in (k_pages, v_pages)
    )  # [1, Hkv, L, D]
    groups = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=groups)  # [1, Hq, 1, Dv]
    return attended[:, :, 0] if out is None else out.copy_(attended[:, :, 0])


def _attend_singly(
    q: Tensor,
    k_pages: Stored,
    v_pages: Stored,
    table: Tensor,
    lens: Tensor,
    starts: Tensor,
    q_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the rows of n sequences of one query, one after another: the keys of each stay in the cache."""
    n, (size, kv_heads, dim) = len(lens), k_pages.shape[1:]
    if n == 0:
        return
    x = q[starts].to(torch.promote_types(q.dtype, torch.float32)).mul_(scale).view(n, kv_heads, -1, dim)
    found = x.new_empty(*x.shape[:3], v_pages.shape[3])  # [n, Hkv, G, Dv]
    slopes = None if alibi_slopes is None else alibi_slopes.view(kv_heads, -1, 1)
    for x_i, found_i, pages, length in zip(x, found, table, lens.tolist(), strict=True):
        start = max(0, length - window) if window else 0
        first = start // size
        ids = pages[first : (length - 1) // size + 1]
        seen = slice(start - first * size, length - first * size)
        k = k_pages.blocks(ids, x.dtype).flatten(0, 1)[seen]  # [L, Hkv, D]
        scores = torch.bmm(x_i, k.permute(1, 2, 0))  # [Hkv, G, L]
        if softcap > 0:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if slopes is not None:
            scores += slopes * torch.arange(1 - len(k), 1, device=q.device)
        v = v_pages.blocks(ids, x.dtype).flatten(0, 1)[seen]
        torch.bmm(scores.softmax(-1), v.transpose(0, 1), out=found_i)
        if sinks is not None:
            found_i *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.view(kv_heads, -1, 1))
    out[starts] = found.flatten(1, 2).to(out.dtype)


def _pieces(q_lens: Tensor, lens: Tensor, pair_bytes: int, key_bytes: int) -> Iterator[slice]:
    """Cut sorted sequences in halves until padding costs less than the work itself and the tensors are small."""
    work = lens * (q_lens + 8)  # a key is copied, then meets each query

    def cut(begin: int, end: int) -> Iterator[slice]:
        keys, queries = int(lens[begin:end].max()) * (end - begin), int(q_lens[begin:end].max())
        wasteful = keys * (queries + 8) > 2 * int(work[begin:end].sum()) + PIECE_COST
        large = keys * queries * pair_bytes > SCORE_BYTES or keys * key_bytes > KV_BYTES
        if end - begin > 1 and (wasteful or large):
            middle = (begin + end) // 2
            yield from cut(begin, middle)
            yield from cut(middle, end)
        else:
            yield slice(begin, end)

    if len(lens):
        yield from cut(0, len(lens))


def _attend(
    q: Tensor,
    k_pages: Stored,
    v_pages: Stored,
    table: Tensor,
    lens: Tensor,
    starts: Tensor,
    q_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the rows of n sequences. Padding repeats a sequence's last query and last key, so it is finite."""
    page_size, n = v_pages.shape[1], len(lens)
    longest, dtype = int(q_lens.max()), torch.promote_types(q.dtype, torch.float32)
    index = torch.arange(max(int(lens.max()), longest), device=q.device)
    first = (lens - q_lens - window + 1).clamp(min=0) if window else torch.zeros_like(lens)
    keys = first[:, None] + index[: int((lens - first).max())]  # [n, L]: positions
    clamped = torch.minimum(keys, lens[:, None] - 1)
    page = table.long().gather(1, clamped // page_size)
    k = k_pages.tokens(page, clamped % page_size, dtype)  # [n, Hkv, L, D]
    v = v_pages.tokens(page, clamped % page_size, dtype)

    fused = longest > 1 and softcap == 0 and alibi_slopes is None and sinks is None and q.shape[2] == v.shape[3]
    fresh = fused and window == 0 and bool((q_lens == lens).all())  # no keys but the queries' own
    step = longest if fused else max(1, SCORE_BYTES // (4 * n * q.shape[1] * keys.shape[1]))
    for begin in range(0, longest, step):
        i = index[begin : min(begin + step, longest)]
        real = i < q_lens[:, None]  # [n, Q]
        i = torch.minimum(i, q_lens[:, None] - 1)
        rows, pos = starts[:, None] + i, (lens - q_lens)[:, None] + i
        x = q[rows].to(dtype).transpose(1, 2)  # [n, Hq, Q, D]
        distance = keys[:, None, :] - pos[:, :, None]  # [n, Q, L]
        sees = (distance <= 0) & (distance > -window) if window else distance <= 0
        if fused:
            mask = None if fresh else sees[:, None]
            found = F.scaled_dot_product_attention(x, k, v, mask, is_causal=fresh, scale=scale, enable_gqa=True)
        else:
            found = _weigh(x, k, v, distance, sees, scale, softcap, alibi_slopes, sinks)
        out[rows[real]] = found.transpose(1, 2)[real].to(out.dtype)


def _weigh(
    x: Tensor,  # [n, Hq, Q, D]
    k: Tensor,  # [n, Hkv, L, D]
    v: Tensor,  # [n, Hkv, L, Dv]
    distance: Tensor,  # [n, Q, L]
    sees: Tensor,  # [n, Q, L]
    scale: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with everything that scores may go through. Returns [n, Hq, Q, Dv]."""
    (n, heads, queries, _), kv_heads = x.shape, k.shape[1]
    grouped = (x * scale).reshape(n, kv_heads, -1, x.shape[3])  # [n, Hkv, G * Q, D]
    scores = (grouped @ k.transpose(2, 3)).view(n, heads, queries, -1)  # [n, Hq, Q, L]
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if alibi_slopes is not None:
        scores += alibi_slopes[:, None, None] * distance[:, None]
    scores.masked_fill_(~sees[:, None], float("-inf"))
    weights = scores.softmax(-1).view(n, kv_heads, -1, scores.shape[3])
    found = (weights @ v).view(n, heads, queries, -1)
    if sinks is not None:
        found *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks[:, None, None].to(found.dtype))
    return found


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scales: Tensor | None,
) -> None:
    """Refuse what no path can run; the kernels take shapes and strides on trust."""
    batch, kv_heads = seq_lens.shape[0], k_pages.shape[2]
    if q.shape[2] != k_pages.shape[3] or k_pages.shape[:3] != v_pages.shape[:3] or q.shape[1] % kv_heads:
        raise ValueError(f"shapes do not fit: q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}")
    if block_table.shape[0] != batch or cu_q.shape != (batch + 1,):
        raise ValueError(
            f"not one batch: block_table {block_table.shape}, seq_lens {seq_lens.shape}, cu_q {cu_q.shape}"
        )
    if any(x.dtype != torch.int32 for x in (block_table, seq_lens, cu_q)) or block_table.stride(-1) != 1:
        raise ValueError("block_table, seq_lens and cu_q must be int32 with contiguous rows")
    if scales is not None:
        check_scales(k_pages, v_pages, scales)
    elif not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"one dtype is needed: q {q.dtype}, k_pages {k_pages.dtype}, v_pages {v_pages.dtype}")
    if any(x.stride(-1) != 1 for x in (q, k_pages, v_pages)):
        raise ValueError("the last dimension of q, k_pages and v_pages must be contiguous")


def runs_on_cpu(q: Tensor) -> bool:
    """Whether the reference is what runs: there is no GPU, or no Triton for it."""
    return q.device.type == "cpu" or not HAS_TRITON


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    max_len: int = 0,
    mixed: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over its pages. Returns [T, Hq, Dv].

    q: [T, Hq, D], rows cu_q[b] to cu_q[b + 1] being the last positions of sequence b, whose seq_lens[b] keys, those
    tokens' own included, are in k_pages [N, bs, Hkv, D] and v_pages [N, bs, Hkv, Dv] at the pages block_table[b] names.
    A query sees the `window` newest keys up to itself (0: all). `sinks` is a logit per head that takes probability and
    has no value. Rows of no sequence, and of sequences without keys, become zeros. `max_len` bounds seq_lens (0: what
    the block table can hold). Pages of int8 or fp8 come with their `scales` [N, 2, Hkv, bs] (see `kv_quant`).

    When `mixed`, sequences of one query go to the split-KV kernel and the others to the ragged one, as the device finds
    them in cu_q: the launches depend on the shapes alone. When `invariant`, a query gets the same bits whatever else is
    in the batch, however its prompt is cut into chunks, and also as a decode. Keys are then not split among programs,
    so that few sequences with long contexts take longer.
    """
    _check(q, k_pages, v_pages, block_table, seq_lens, cu_q, scales)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    options |= {"alibi_slopes": alibi_slopes, "sinks": sinks, "scales": scales}
    args = (q, k_pages, v_pages, block_table, seq_lens, cu_q, max_q)
    if runs_on_cpu(q):
        return paged_attention_ref(*args, out=out, invariant=invariant, **options)
    options["out"] = q.new_empty(*q.shape[:2], v_pages.shape[3]) if out is None else out
    decodes = max_q <= 1 and q.shape[0] == seq_lens.shape[0]
    if not invariant and (decodes or mixed):
        paged_attention_decode(*args, max_len=max_len, mixed=not decodes, **options)
    if invariant or not decodes:
        paged_attention_prefill(*args, mixed=mixed and not invariant, invariant=invariant, **options)
    return options["out"]
