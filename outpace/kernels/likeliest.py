"""The likeliest token of each row of logits, which is also written to the row of its request."""
# mypy: disallow-untyped-decorators=False

import torch
from torch import Tensor

from outpace.kernels.launch_options import few_overlap, pdl_options
from outpace.kernels.triton_stub import tl, triton

BLOCK = 4096  # logits of a program


def write_likeliest_torch(logits: Tensor, state: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """The index of the largest of logits [S, V], the first one of several: [S] int64.

    It is also written to state[rows[s], places[s]]. state: int32 [R, L]; rows, places: [S].
    """
    found = logits.argmax(-1)
    state.view(-1).index_copy_(0, rows.long() * state.shape[1] + places, found.to(state.dtype))
    return found


@triton.jit
def _block_kernel(
    values_ptr: tl.tensor,  # fp32 [S, P]
    ids_ptr: tl.tensor,  # int32 [S, P]
    logits_ptr: tl.tensor,  # [S, V]
    vocab: tl.tensor,
    stride: tl.tensor,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    seq = tl.program_id(1)
    at = part * block + tl.arange(0, block)
    x = tl.load(logits_ptr + seq.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN is the largest, as in torch
    value, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    here = seq * tl.num_programs(0) + part
    tl.store(values_ptr + here, value)
    tl.store(ids_ptr + here, part * block + place)


@triton.jit(do_not_specialize=["parts"])
def _choose_kernel(
    out_ptr: tl.tensor,  # int64 [S]
    state_ptr: tl.tensor,  # int32 [R, L]
    rows_ptr: tl.tensor,  # [S]
    places_ptr: tl.tensor,  # [S]
    values_ptr: tl.tensor,  # [S, P]
    ids_ptr: tl.tensor, parts: tl.tensor, width: tl.tensor,
    block: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    if pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(0)
    lane = tl.arange(0, block)
    values = tl.load(values_ptr + seq * parts + lane, mask=lane < parts, other=float("-inf"))
    _, best = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(ids_ptr + seq * parts + best)
    tl.store(out_ptr + seq, token.to(tl.int64))
    row = tl.load(rows_ptr + seq).to(tl.int64)
    tl.store(state_ptr + row * width + tl.load(places_ptr + seq), token)


def write_likeliest_triton(logits: Tensor, state: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """write_likeliest_torch in two kernels: the blocks of each row, then the rows."""
    count, vocab = logits.shape
    assert logits.stride(1) == 1, "rows must be contiguous"
    assert state.dtype == torch.int32, state.dtype
    assert state.is_contiguous(), "rows of requests are adjacent"
    parts = triton.cdiv(vocab, BLOCK)
    values = torch.empty(count, parts, device=logits.device)
    ids = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return out
    options = pdl_options(few_overlap(count, logits))
    stride = vocab if count == 1 else logits.stride(0)
    _block_kernel[(parts, count)](values, ids, logits, vocab, stride, block=BLOCK, **options)
    _choose_kernel[(count,)](
        *(out, state, rows, places, values, ids, parts, state.shape[1]),
        block=triton.next_power_of_2(parts),
        num_warps=1,
        **options,
    )
    return out
