"""Attention of ragged batches over paged keys and values, in torch: on a CPU, and as the reference of the kernels."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.attention_by_page import PagedSequences, attend_by_page
from outpace.kernels.attention_tile import Scoring
from outpace.kernels.kv_quant import Stored, stored

SCORE_BYTES = 256 << 20  # of the largest score tensor
KV_BYTES = 8 << 20  # keys and values copied at a time where possible (8 decodes over 1,000 keys: 8.8 ms, at once 11.0)
INVARIANT_ROWS = 16  # most queries x heads of one KV head in an invariant product, of which a decode wastes the rest
FEW_DECODES = 16  # up to this many decodes are as fast padded together as page by page
PIECE_COST = 1 << 14  # cost of one more piece, in the units of `_pieces`


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's own attention over one sequence without a cache. q, k, v: [T, heads, D]."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    groups = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups)
    return attended[0].transpose(0, 1)


def paged_attention_torch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    max_q: int,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    max_len: int = 0,
    mixed: bool = False,
    invariant: bool = False,
    plans: object = None,
    **scoring: Any,
) -> Tensor:
    """`paged_attention` in torch; KV heads are never repeated. max_len, mixed and plans are ignored.

    Sequences of similar lengths are padded together. On one thread single queries run one after another, and on more
    threads many of them run page by page: 32 (128) of them, 9/3 heads of 64 over 50 to 500 keys, take 2.8 (11.3) ms
    on one thread and 2.4 (7.9) on two; padded together 3.9 (15.4) and 2.7 (10.2).
    """
    keys, values = stored(k_pages, v_pages, scales)
    how = Scoring(**scoring)
    one_plain = how.is_plain and q.dtype == torch.float32 and not invariant and len(q) == len(seq_lens) == 1
    if one_plain and int(cu_q[1]) == 1 and (length := int(seq_lens[0])) > 0:
        return _one_token(q, keys, values, block_table[0], length, how, out)
    out = q.new_zeros(*q.shape[:2], v_pages.shape[3]) if out is None else out.zero_()
    every = PagedSequences(block_table, seq_lens.long(), cu_q[:-1].long(), cu_q.diff().long())

    def attend(function: Callable[..., None], seqs: Tensor) -> None:
        if len(seqs):
            function(q, keys, values, every.some(seqs), how, out)

    alive = (every.q_lens > 0) & (every.lens > 0)
    if invariant:
        block = max(1, INVARIANT_ROWS * k_pages.shape[2] // q.shape[1])
        attend(partial(attend_by_page, block), torch.nonzero(alive).squeeze(1))
        return out
    single, one_thread = torch.nonzero(alive & (every.q_lens == 1)).squeeze(1), torch.get_num_threads() == 1
    if one_thread or len(single) > FEW_DECODES:
        attend(_attend_singly if one_thread else partial(attend_by_page, 1), single)
        alive &= every.q_lens > 1
    live = torch.nonzero(alive).squeeze(1)
    live = live[(every.q_lens[live] * (1 + block_table.shape[1] * k_pages.shape[1]) + every.lens[live]).argsort()]
    key_bytes = 4 * k_pages.shape[2] * (k_pages.shape[3] + v_pages.shape[3])
    for piece in _pieces(every.q_lens[live], every.lens[live], 4 * q.shape[1], key_bytes):
        attend(_attend, live[piece])
    return out


def _one_token(
    q: Tensor, k_pages: Stored, v_pages: Stored, table: Tensor, length: int, how: Scoring, out: Tensor | None
) -> Tensor:
    """One query of one sequence: nothing to sort, pad or mask. 0.09 ms against 0.41 for 9/3 heads of 64 on 2 cores."""
    size = k_pages.shape[1]
    start = how.first_seen(length)
    first = start // size
    pages = table[first : (length - 1) // size + 1]
    k, v = (
        part.run(pages, q.dtype).flatten(0, 1)[start - first * size : length - first * size].transpose(0, 1)[None]
        for part in (k_pages, v_pages)
    )  # [1, Hkv, L, D]
    groups = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q[:, :, None], k, v, scale=how.scale, enable_gqa=groups)  # [1, Hq, 1, Dv]
    return attended[:, :, 0] if out is None else out.copy_(attended[:, :, 0])


def _attend_singly(
    q: Tensor, k_pages: Stored, v_pages: Stored, seqs: PagedSequences, how: Scoring, out: Tensor
) -> None:
    """Write the rows of n sequences of one query, one after another: the keys of each stay in the CPU's cache."""
    n, (size, kv_heads, dim) = len(seqs.lens), k_pages.shape[1:]
    x = q[seqs.starts].to(torch.promote_types(q.dtype, torch.float32)).mul_(how.scale).view(n, kv_heads, -1, dim)
    found = x.new_empty(*x.shape[:3], v_pages.shape[3])  # [n, Hkv, G, Dv]
    slopes = None if how.alibi_slopes is None else how.alibi_slopes.view(kv_heads, -1, 1)
    for x_i, found_i, pages, length in zip(x, found, seqs.table, seqs.lens.tolist(), strict=True):
        start = how.first_seen(length)
        first = start // size
        ids = pages[first : (length - 1) // size + 1]
        seen = slice(start - first * size, length - first * size)
        k = k_pages.blocks(ids, x.dtype).flatten(0, 1)[seen]  # [L, Hkv, D]
        scores = how.capped(torch.bmm(x_i, k.permute(1, 2, 0)))  # [Hkv, G, L]
        if slopes is not None:
            scores += slopes * torch.arange(1 - len(k), 1, device=q.device)
        v = v_pages.blocks(ids, x.dtype).flatten(0, 1)[seen]
        torch.bmm(scores.softmax(-1), v.transpose(0, 1), out=found_i)
        if how.sinks is not None:
            found_i *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - how.sinks.view(kv_heads, -1, 1))
    out[seqs.starts] = found.flatten(1, 2).to(out.dtype)


def _pieces(q_lens: Tensor, lens: Tensor, pair_bytes: int, key_bytes: int) -> Iterator[slice]:
    """Cut sorted sequences in halves until padding costs less than the work itself and the tensors are small."""
    work = lens * (q_lens + 8)  # a key is copied, then multiplied with each query

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


def _attend(q: Tensor, k_pages: Stored, v_pages: Stored, seqs: PagedSequences, how: Scoring, out: Tensor) -> None:
    """Write the rows of n sequences. Padding repeats a sequence's last query and last key, so it is finite."""
    lens, q_lens, window = seqs.lens, seqs.q_lens, how.window
    page_size, n = v_pages.shape[1], len(lens)
    longest, dtype = int(q_lens.max()), torch.promote_types(q.dtype, torch.float32)
    index = torch.arange(max(int(lens.max()), longest), device=q.device)
    first = (lens - q_lens - window + 1).clamp(min=0) if window else torch.zeros_like(lens)
    keys = first[:, None] + index[: int((lens - first).max())]  # [n, L]: positions
    clamped = torch.minimum(keys, lens[:, None] - 1)
    page = seqs.table.long().gather(1, clamped // page_size)
    k = k_pages.tokens(page, clamped % page_size, dtype)  # [n, Hkv, L, D]
    v = v_pages.tokens(page, clamped % page_size, dtype)

    fused = longest > 1 and how.is_plain and q.shape[2] == v.shape[3]
    fresh = fused and window == 0 and bool((q_lens == lens).all())  # no keys but the queries' own
    step = longest if fused else max(1, SCORE_BYTES // (4 * n * q.shape[1] * keys.shape[1]))
    for begin in range(0, longest, step):
        i = index[begin : min(begin + step, longest)]
        real = i < q_lens[:, None]  # [n, Q]
        i = torch.minimum(i, q_lens[:, None] - 1)
        rows, pos = seqs.starts[:, None] + i, (lens - q_lens)[:, None] + i
        x = q[rows].to(dtype).transpose(1, 2)  # [n, Hq, Q, D]
        distance = keys[:, None, :] - pos[:, :, None]  # [n, Q, L]
        sees = (distance <= 0) & (distance > -window) if window else distance <= 0
        if fused:
            mask = None if fresh else sees[:, None]
            found = F.scaled_dot_product_attention(x, k, v, mask, is_causal=fresh, scale=how.scale, enable_gqa=True)
        else:
            found = _weigh(x, k, v, distance, sees, how)
        out[rows[real]] = found.transpose(1, 2)[real].to(out.dtype)


def _weigh(
    x: Tensor,  # [n, Hq, Q, D]
    k: Tensor,  # [n, Hkv, L, D]
    v: Tensor,  # [n, Hkv, L, Dv]
    distance: Tensor,  # [n, Q, L]
    sees: Tensor,  # [n, Q, L]
    how: Scoring,
) -> Tensor:
    """Attention with cap, ALiBi, mask and sinks. Returns [n, Hq, Q, Dv]."""
    (n, heads, queries, _), kv_heads = x.shape, k.shape[1]
    grouped = (x * how.scale).reshape(n, kv_heads, -1, x.shape[3])  # [n, Hkv, G * Q, D]
    scores = how.capped((grouped @ k.transpose(2, 3)).view(n, heads, queries, -1))  # [n, Hq, Q, L]
    if how.alibi_slopes is not None:
        scores += how.alibi_slopes[:, None, None] * distance[:, None]
    scores.masked_fill_(~sees[:, None], float("-inf"))
    weights = scores.softmax(-1).view(n, kv_heads, -1, scores.shape[3])
    found = (weights @ v).view(n, heads, queries, -1)
    if how.sinks is not None:
        found *= torch.sigmoid(scores.logsumexp(-1, keepdim=True) - how.sinks[:, None, None].to(found.dtype))
    return found
