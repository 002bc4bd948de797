"""Attention over paged keys and values by the kernels: what they take, and which of them runs which shape."""

from typing import Any

import torch
from torch import Tensor

from outpace.kernels.attention_decode import paged_attention_decode
from outpace.kernels.attention_prefill import paged_attention_prefill
from outpace.kernels.decode_plan import DecodePlans
from outpace.kernels.kv_quant import check_scales


def _check(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, seq_lens: Tensor, cu_q: Tensor, scales: Tensor | None
) -> None:
    """Refuse what no kernel can run; they do not check shapes and strides themselves."""
    batch, kv_heads = seq_lens.shape[0], k_pages.shape[2]
    if q.shape[2] != k_pages.shape[3] or k_pages.shape[:3] != v_pages.shape[:3] or q.shape[1] % kv_heads:
        raise ValueError(f"shapes do not fit: q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}")
    if table.shape[0] != batch or cu_q.shape != (batch + 1,):
        raise ValueError(f"not one batch: block_table {table.shape}, seq_lens {seq_lens.shape}, cu_q {cu_q.shape}")
    if any(x.dtype != torch.int32 for x in (table, seq_lens, cu_q)) or table.stride(-1) != 1:
        raise ValueError("block_table, seq_lens and cu_q must be int32 with contiguous rows")
    if scales is not None:
        check_scales(k_pages, v_pages, scales)
    elif not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"one dtype is needed: q {q.dtype}, k_pages {k_pages.dtype}, v_pages {v_pages.dtype}")
    if any(x.stride(-1) != 1 for x in (q, k_pages, v_pages)):
        raise ValueError("the last dimension of q, k_pages and v_pages must be contiguous")


def paged_attention(
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
    plans: DecodePlans | None = None,
    **scoring: Any,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over its pages. Returns [T, Hq, Dv].

    q: [T, Hq, D], rows cu_q[b] to cu_q[b + 1] being the last positions of sequence b, whose seq_lens[b] keys, those
    tokens' own included, are in k_pages [N, bs, Hkv, D] and v_pages [N, bs, Hkv, Dv] at the pages block_table[b] names.
    scoring: the fields of `Scoring`. Rows of no sequence, and of sequences without keys, become zeros. `max_len` bounds
    seq_lens (0: what the block table can hold). Pages of int8 or fp8 come with their `scales` [N, 2, Hkv, bs] (see
    `kv_quant`).

    `mixed`: sequences of one query go to the decode kernel and the others to the prefill kernel, as the device finds
    them in cu_q: the launches depend on the shapes alone. `plans`, the same for all layers of a forward, keep how keys
    are shared among programs; without them each call plans. `invariant`: a query gets the same bits whatever else is in
    the batch, however its prompt is cut into chunks, and also as a decode. Keys are then not split among programs, so
    few sequences with long contexts take longer.
    """
    _check(q, k_pages, v_pages, block_table, seq_lens, cu_q, scales)
    args = (q, k_pages, v_pages, block_table, seq_lens, cu_q, max_q)
    out = q.new_empty(*q.shape[:2], v_pages.shape[3]) if out is None else out
    options: dict[str, Any] = {**scoring, "scales": scales, "out": out}
    decodes = max_q <= 1 and q.shape[0] == seq_lens.shape[0]
    if not invariant and (decodes or mixed):
        paged_attention_decode(*args, max_len=max_len, mixed=not decodes, plans=plans, **options)
    if invariant or not decodes:
        paged_attention_prefill(*args, mixed=mixed and not invariant, invariant=invariant, **options)
    return out
