"""Attention in torch over the keys of a sequence page by page: for many decodes, and for invariant results.

A tile is `block` consecutive queries of one sequence. Each pair of a tile and a page is an item, and one batched
product computes all items. Each item has its own softmax, and the items of a tile are combined at the end. So nothing
is padded to the longest sequence, and the number of torch calls does not grow with the batch.

Invariance: a query at position p is always row p % block of its tile, so every product has one shape, and a query one
row in it. A batched product gives an item the same bits whatever the batch, and so do `exp`, `tanh` and sums over the
last dimension (`exp2` and `sigmoid` do not; all seen with torch 2.13 on 1 and 2 threads). Pages that a query does not
see, but others of its tile do, have the weight 0: they add zeros, which is exact. The items of a tile are added in the
order of their pages.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.attention_tile import Scoring
from outpace.kernels.kv_quant import Stored

SLICE_BYTES = 2 << 20  # keys or values copied at a time
GROUP_BYTES = 64 << 20  # scores and sums of the items at a time
LOWEST = -1.0e30  # finite, so that a row that sees no key of a page never computes inf - inf


class PagedSequences(NamedTuple):
    """The sequences of a batch."""

    table: Tensor  # [n, M]
    lens: Tensor  # [n] keys
    starts: Tensor  # [n] rows of the first queries
    q_lens: Tensor  # [n] queries

    def some(self, index: Tensor) -> "PagedSequences":
        """The sequences at these indices."""
        return PagedSequences(*(part[index] for part in self))


def _runs(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of counts[i] numbers that start at first[i], one after the other: the run of each number, and the number."""
    run = torch.repeat_interleave(counts)
    return run, torch.arange(len(run), device=run.device) - (counts.cumsum(0) - counts - first)[run]


def attend_by_page(
    block: int, q: Tensor, k_pages: Stored, v_pages: Stored, seqs: PagedSequences, how: Scoring, out: Tensor
) -> None:
    """Write the rows of n sequences, each with a key and a query or more, to `out` [T, Hq, Dv]. q: [T, Hq, D]."""
    (table, lens, starts, q_lens), window = seqs, how.window
    size, kv_heads = k_pages.shape[1:3]
    old = lens - q_lens  # position of the first query
    seq, number = _runs(old // block, (lens - 1) // block - old // block + 1)  # [I] tiles
    low = torch.maximum(number * block, old[seq])  # positions of a tile's first query, last query and first key
    high = torch.minimum(number * block + block, lens[seq]) - 1
    first = (low - window + 1).clamp_(min=0) if window else torch.zeros_like(low)
    pages = high // size - first // size + 1
    row_0 = (starts - old)[seq]  # the row that the query at position 0 has or would have
    item_bytes = 4 * block * q.shape[1] * (size + v_pages.shape[3])
    groups = (pages.cumsum(0) * item_bytes // GROUP_BYTES).unique_consecutive(return_counts=True)[1].tolist()
    for tiles in torch.arange(len(seq), device=q.device).split(groups):
        tile, page = _runs((first // size)[tiles], pages[tiles])  # [J] items: the tile, counted in its group
        pos = number[tiles, None] * block + torch.arange(block, device=q.device)  # [I, Q]
        real = (pos >= low[tiles, None]) & (pos <= high[tiles, None])
        rows = row_0[tiles, None] + torch.clamp(pos, low[tiles, None], high[tiles, None])
        x = q[rows].to(torch.promote_types(q.dtype, torch.float32)) * how.scale  # [I, Q, Hq, D]
        x = x.unflatten(2, (kv_heads, -1)).transpose(1, 2)  # [I, Hkv, Q, G, D]
        keys = page[:, None] * size + torch.arange(size, device=q.device)  # [J, bs]
        ids = table[seq[tiles][tile], page]
        scores = _scores(x.flatten(2, 3), tile, k_pages, ids)  # [J, Hkv, Q * G, bs]
        distance = keys[:, None] - pos[tile][:, :, None]  # [J, Q, bs]
        scores = _shape(scores.view(-1, *x.shape[1:4], size), distance, how)
        top = scores.amax(-1).clamp_(min=LOWEST)  # [J, Hkv, Q, G]
        weights = scores.sub_(top[..., None]).exp_()
        exists = (keys >= first[tiles][tile, None]) & (keys <= high[tiles][tile, None])
        found = _sums(weights.flatten(2, 3), v_pages, ids, exists)  # [J, Hkv, Q * G, Dv]
        found = _combine(found.view(*top.shape, -1), top, weights.sum(-1), tile, len(tiles), how.sinks)
        out[rows[real]] = found.transpose(1, 2).flatten(2, 3)[real].to(out.dtype)


def _slices(pages: Stored, items: int) -> list[slice]:
    """Slices of items whose pages fit in the CPU's cache."""
    step = max(1, SLICE_BYTES // (4 * math.prod(pages.shape[1:])))
    return [slice(begin, begin + step) for begin in range(0, items, step)]


def _scores(x: Tensor, tile: Tensor, pages: Stored, ids: Tensor) -> Tensor:
    """Queries [I, Hkv, R, D] of each item's tile times the keys of its page: [J, Hkv, R, bs]."""
    out = x.new_empty(len(ids), *x.shape[1:3], pages.shape[1])
    for some in _slices(pages, len(ids)):
        keys = pages.blocks(ids[some], x.dtype).transpose(1, 2).flatten(0, 1)  # [j * Hkv, bs, D]
        torch.bmm(x[tile[some]].flatten(0, 1), keys.transpose(1, 2), out=out[some].flatten(0, 1))
    return out


def _sums(weights: Tensor, pages: Stored, ids: Tensor, exists: Tensor) -> Tensor:
    """Weights [J, Hkv, R, bs] times the values of each item's page: [J, Hkv, R, Dv]. Where not `exists` may be NaN."""
    out = weights.new_empty(*weights.shape[:3], pages.shape[3])
    for some in _slices(pages, len(ids)):
        values = pages.blocks(ids[some], out.dtype)  # [j, bs, Hkv, Dv]
        values.flatten(0, 1).index_fill_(0, torch.nonzero(~exists[some].flatten()).squeeze(1), 0.0)
        values = values.transpose(1, 2).flatten(0, 1)  # [j * Hkv, bs, Dv]
        torch.bmm(weights[some].flatten(0, 1), values, out=out[some].flatten(0, 1))
    return out


def _shape(scores: Tensor, distance: Tensor, how: Scoring) -> Tensor:
    """Cap, bias and mask scores [J, Hkv, Q, G, bs] in place; `distance` is [J, Q, bs]."""
    scores, window = how.capped(scores), how.window
    if how.alibi_slopes is not None:
        scores += how.alibi_slopes.view(scores.shape[1], 1, -1, 1) * distance[:, None, :, None]
    hidden = (distance > 0) | (distance <= -window) if window else distance > 0
    return scores.masked_fill_(hidden[:, None, :, None], float("-inf"))


def _combine(found: Tensor, top: Tensor, sums: Tensor, tile: Tensor, tiles: int, sinks: Tensor | None) -> Tensor:
    """Combine the items of each tile: found [J, Hkv, Q, G, Dv], maximum and sum [J, Hkv, Q, G]."""
    shape = (tiles, *top.shape[1:])
    # a sink is one more key that adds no value
    own = top.new_full((), LOWEST) if sinks is None else sinks.to(top.dtype).view(shape[1], 1, shape[3])
    best = own.expand(shape).clone().scatter_reduce_(0, tile[:, None, None, None].expand_as(top), top, "amax")
    share = (top - best[tile]).exp_()
    total = top.new_zeros(shape) if sinks is None else (own - best).exp_()
    total.index_add_(0, tile, sums.mul_(share))
    added = found.new_zeros(tiles, *found.shape[1:]).index_add_(0, tile, found.mul_(share[..., None]))
    return added.div_(total[..., None])
