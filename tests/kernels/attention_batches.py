"""Paged batches whose every unused number is NaN and every unused page id is nonsense, and their attention in fp64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.kernels.buffers import poisoned

NONSENSE = (-7, 2**30, -(2**31))  # block ids that no kernel may follow
SHUFFLED_SPARES = 3  # pages of NaN that belong to nobody


@dataclass(frozen=True)
class Case:
    """A batch in numbers: (queries, keys) of each sequence, rows of padding, heads, widths, what scores go through."""

    seqs: tuple[tuple[int, int], ...]
    padding: int = 0
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    page: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class Batch:
    """The tensors of a case: `args` and `options` as every `paged_attention` takes them."""

    case: Case
    args: tuple[Any, ...]
    options: dict[str, Any]

    def empty_output(self) -> torch.Tensor:
        """A tensor like the output."""
        q: torch.Tensor = self.args[0]
        return q.new_empty(*q.shape[:2], self.case.dims[1])

    def chunks(self, parts: Sequence[tuple[int, int, int]], padding: int = 0) -> tuple["Batch", torch.Tensor]:
        """A batch of tokens begin to end of some sequences (b, begin, end), and where its rows are in this batch.

        Here every sequence must be whole: a query for each key.
        """
        assert all(q_len == n for q_len, n in self.case.seqs)
        q, k_pages, v_pages, table, _, cu_q, _ = self.args
        rows = torch.cat([torch.arange(begin, end) + int(cu_q[b]) for b, begin, end in parts]).to(q.device)
        chosen = torch.tensor([b for b, _, _ in parts], device=q.device)
        seqs = tuple((end - begin, end) for _, begin, end in parts)
        sizes = torch.tensor([0, *(q_len for q_len, _ in seqs)]).cumsum(0)
        lens = torch.tensor([end for _, _, end in parts])
        ints = [x.to(q.device, torch.int32) for x in (lens, sizes)]
        new_q = torch.cat([q[rows], torch.full_like(q[:1], float("nan")).expand(padding, -1, -1)])
        args = (new_q, k_pages, v_pages, table[chosen], *ints, max(q_len for q_len, _ in seqs))
        return Batch(replace(self.case, seqs=seqs, padding=padding), args, self.options), rows


def make_batch(case: Case, device: torch.device) -> Batch:
    """Random tensors for a case."""
    (heads, kv_heads), (dim, v_dim), size = case.heads, case.dims, case.page
    q_lens, lens = [q for q, _ in case.seqs], [n for _, n in case.seqs]
    pages_of = [-(-n // size) for n in lens]
    num_pages = sum(pages_of) + SHUFFLED_SPARES
    ids = torch.randperm(num_pages).tolist()
    table = torch.tensor(NONSENSE * (max(pages_of) + 2))[: max(pages_of) + 2].repeat(len(lens), 1)
    k_pages = torch.full((num_pages, size, kv_heads, dim), float("nan"))
    v_pages = torch.full((num_pages, size, kv_heads, v_dim), float("nan"))
    for b, (q_len, n) in enumerate(case.seqs):
        for i in range(first_key(case, q_len, n) // size, pages_of[b]):  # pages that left the window are gone
            table[b, i] = page = ids.pop()
            begin, end = max(first_key(case, q_len, n) - i * size, 0), min(n - i * size, size)
            k_pages[page, begin:end] = torch.randn(end - begin, kv_heads, dim)
            v_pages[page, begin:end] = torch.randn(end - begin, kv_heads, v_dim)
    q = torch.randn(sum(q_lens) + case.padding, heads, dim)
    q[sum(q_lens) :] = float("nan")
    cu_q = torch.tensor([0, *q_lens]).cumsum(0)
    floats = [x.to(device, case.dtype) for x in (q, k_pages, v_pages)]
    floats[0] = poisoned(floats[0], gap=8)
    ints = [x.to(device, torch.int32) for x in (table, torch.tensor(lens), cu_q)]
    options = {
        "scale": dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "alibi_slopes": torch.rand(heads, device=device) if case.alibi else None,
        "sinks": torch.randn(heads, device=device) if case.sinks else None,
    }
    return Batch(case, (*floats, *ints, max([*q_lens, 1])), options)


def first_key(case: Case, q_len: int, n: int) -> int:
    """The first key that any query of a sequence sees."""
    return max(0, n - q_len - case.window + 1) if case.window else 0


def in_fp64(batch: Batch) -> torch.Tensor:
    """One sequence, one query at a time."""
    q, k_pages, v_pages, table, _, cu_q, _ = (x.cpu() if isinstance(x, torch.Tensor) else x for x in batch.args)
    case, options = batch.case, batch.options
    (heads, kv_heads), slopes, sinks = case.heads, options["alibi_slopes"], options["sinks"]
    out = torch.zeros(q.shape[0], heads, v_pages.shape[3], dtype=torch.float64)
    for b, (q_len, n) in enumerate(case.seqs):
        for i in range(q_len if n else 0):
            pos, row = n - q_len + i, int(cu_q[b]) + i
            seen = torch.arange(max(0, pos - case.window + 1) if case.window else 0, pos + 1)
            page = table[b, seen // case.page].long()
            k, v = (x[page, seen % case.page].double() for x in (k_pages, v_pages))  # [L, Hkv, D]
            x = q[row].double().view(kv_heads, -1, q.shape[2])  # [Hkv, G, D]
            s = torch.einsum("lkd,kgd->kgl", k, x).reshape(heads, -1) * options["scale"]  # [Hq, L]
            s = case.softcap * torch.tanh(s / case.softcap) if case.softcap else s
            s = s + slopes.cpu().double()[:, None] * (seen - pos) if case.alibi else s
            s = torch.cat([s, sinks.cpu().double()[:, None]], dim=1) if case.sinks else s
            weights = s.softmax(1)[:, : len(seen)].view(kv_heads, -1, len(seen))
            out[row] = torch.einsum("kgl,lkd->kgd", weights, v).reshape(heads, -1)
    return out.to(batch.args[0].device)
