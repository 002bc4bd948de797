"""Paged attention by the Triton kernels: checks the arguments, and calls the decode or the prefill kernel, or both."""

from typing import Any

import torch
from torch import Tensor

from outpace.kernels.attention_decode import paged_attention_decode
from outpace.kernels.attention_prefill import paged_attention_prefill
from outpace.kernels.decode_plan import DecodePlans
from outpace.kernels.kv_quant import check_page_scales


def _check(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, seq_lens: Tensor, cu_q: Tensor, scales: Tensor | None
) -> None:
    """Raise for arguments that no kernel can run: the kernels do not check shapes and strides."""
    batch, kv_heads = seq_lens.shape[0], k_pages.shape[2]
    if q.shape[2] != k_pages.shape[3] or k_pages.shape[:3] != v_pages.shape[:3] or q.shape[1] % kv_heads:
        raise ValueError(f"shapes do not fit: q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}")
    if table.shape[0] != batch or cu_q.shape != (batch + 1,):
        raise ValueError(f"batch sizes differ: block_table {table.shape}, seq_lens {seq_lens.shape}, cu_q {cu_q.shape}")
    if any(x.dtype != torch.int32 for x in (table, seq_lens, cu_q)) or table.stride(-1) != 1:
        raise ValueError("block_table, seq_lens and cu_q must be int32 with contiguous rows")
    if scales is not None:
        check_page_scales(k_pages, v_pages, scales)
    elif not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"dtypes differ: q {q.dtype}, k_pages {k_pages.dtype}, v_pages {v_pages.dtype}")
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

    q: [T, Hq, D]; rows cu_q[b] to cu_q[b + 1] are the last positions of sequence b. Its seq_lens[b] keys, including
    those of these tokens, are in the pages block_table[b] of k_pages [N, bs, Hkv, D] and v_pages [N, bs, Hkv, Dv].
    scoring: the fields of `Scoring`. Rows that belong to no sequence, or to one without keys, become zeros. `max_len`
    bounds seq_lens (0: what the block table can hold). Pages of int8 or fp8 come with their `scales` [N, 2, Hkv, bs]
    (see `kv_quant`).

    `mixed`: the decode kernel computes sequences of one query, the prefill kernel the others. The device reads cu_q to
    tell them apart, so the launches depend on shapes alone. `plans`: how keys are divided among programs, for all
    layers of a forward; None: each call makes a plan. `invariant`: a query gets the same bits whatever else is in the
    batch, however its prompt is cut into chunks, and also in a decode step. Keys are then not split among programs, so
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
