"""Computes the inputs of a forward for every token of a ragged batch from a few numbers for every sequence."""
# mypy: disallow-untyped-decorators=False

from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.triton_stub import tl, triton

TOKENS = 128  # tokens that one program looks up
PAGES = 1024  # entries of a block table that one program copies


class Ragged(NamedTuple):
    """The tokens of a batch, sequence after sequence, and the pages of its sequences."""

    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64: page * page_size + offset; -1: padding."""
    block_table: Tensor
    """[S, M] int32."""
    seq_lens: Tensor
    """[S] int32: keys of each sequence, these tokens' own included; 0 where it has no tokens."""


def ragged_inputs_torch(
    tokens: Tensor, table: Tensor, rows: Tensor, starts: Tensor, cu_q: Tensor, num_tokens: int, page_size: int
) -> Ragged:
    """Look up T tokens. tokens [R, L] and table [R, M] are int32 rows of requests; sequence s computes the tokens of
    row rows[s] from starts[s] on, tokens cu_q[s] to cu_q[s + 1] of the batch; the rest of the batch is padding."""
    at = torch.arange(num_tokens, device=tokens.device)
    seq = torch.searchsorted(cu_q[1:], at, right=True, out_int32=True).clamp_(max=len(rows) - 1)
    real = at < cu_q[-1]
    row = rows[seq]
    positions = torch.where(real, at - cu_q[seq] + starts[seq], 0)
    page = table[row, positions // page_size].long()
    slots = torch.where(real, page * page_size + positions % page_size, -1)
    ids = torch.where(real, tokens[row, positions], 0).long()
    lens = torch.where(cu_q.diff() > 0, starts + cu_q.diff(), 0)
    return Ragged(ids, positions, slots, table.index_select(0, rows), lens)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "width", "token_blocks", "page_blocks"])
def _ragged_inputs_kernel(
    ids_ptr: tl.tensor, positions_ptr: tl.tensor, slots_ptr: tl.tensor, table_out_ptr: tl.tensor,
    lens_ptr: tl.tensor, tokens_ptr: tl.tensor, table_ptr: tl.tensor, rows_ptr: tl.tensor,
    starts_ptr: tl.tensor, cu_q_ptr: tl.tensor, num_tokens: tl.tensor, num_seqs: tl.tensor, width: tl.tensor,
    tokens_stride: tl.tensor, table_stride: tl.tensor, token_blocks: tl.tensor, page_blocks: tl.tensor,
    page_size: tl.constexpr, block_t: tl.constexpr, block_p: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    if program < token_blocks:
        at = program * block_t + tl.arange(0, block_t)
        low = tl.zeros([block_t], tl.int32)  # the last sequence that begins at or before the token and is not empty
        high = low + num_seqs - 1
        reach = 1
        while reach < num_seqs:
            mid = (low + high + 1) // 2
            after = tl.load(cu_q_ptr + mid) > at
            low = tl.where(after, low, mid)
            high = tl.where(after, mid - 1, high)
            reach *= 2
        real = (at < tl.load(cu_q_ptr + num_seqs)) & (at < num_tokens)
        rows = tl.load(rows_ptr + low).to(tl.int64)
        position = tl.where(real, at - tl.load(cu_q_ptr + low) + tl.load(starts_ptr + low), 0)
        token = tl.load(tokens_ptr + rows * tokens_stride + position, mask=real, other=0)
        page = tl.load(table_ptr + rows * table_stride + position // page_size, mask=real, other=0).to(tl.int64)
        inside = at < num_tokens
        tl.store(ids_ptr + at, token.to(tl.int64), mask=inside)
        tl.store(positions_ptr + at, position.to(tl.int64), mask=inside)
        slot = tl.where(real, page * page_size + position % page_size, -1)
        tl.store(slots_ptr + at, slot, mask=inside)
    else:
        seq = (program - token_blocks) // page_blocks
        block = (program - token_blocks) % page_blocks
        row = tl.load(rows_ptr + seq).to(tl.int64)
        column = block * block_p + tl.arange(0, block_p)
        pages = tl.load(table_ptr + row * table_stride + column, mask=column < width, other=0)
        tl.store(table_out_ptr + seq.to(tl.int64) * width + column, pages, mask=column < width)
        if block == 0:
            count = tl.load(cu_q_ptr + seq + 1) - tl.load(cu_q_ptr + seq)
            tl.store(lens_ptr + seq, tl.where(count > 0, tl.load(starts_ptr + seq) + count, 0))


def ragged_inputs_triton(
    tokens: Tensor, table: Tensor, rows: Tensor, starts: Tensor, cu_q: Tensor, num_tokens: int, page_size: int
) -> Ragged:
    """ragged_inputs_torch in one kernel."""
    num_seqs, width = len(rows), table.shape[1]
    assert tokens.stride(1) == table.stride(1) == 1, "rows must be contiguous"
    assert all(x.dtype == torch.int32 for x in (tokens, table, rows, starts, cu_q))
    assert cu_q.shape == (num_seqs + 1,)
    ids, positions, slots = (torch.empty(num_tokens, dtype=torch.int64, device=tokens.device) for _ in range(3))
    found = Ragged(ids, positions, slots, table.new_empty(num_seqs, width), table.new_empty(num_seqs))
    token_blocks, page_blocks = triton.cdiv(num_tokens, TOKENS), triton.cdiv(width, PAGES)
    _ragged_inputs_kernel[(token_blocks + num_seqs * page_blocks,)](
        *found,
        *(tokens, table, rows, starts, cu_q, num_tokens, num_seqs, width, tokens.stride(0), table.stride(0)),
        *(token_blocks, page_blocks, page_size),
        block_t=TOKENS,
        block_p=PAGES,
    )
    return found
