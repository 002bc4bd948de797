"""Copies blocks of the key-value cache to and from rows of bytes: all layers' keys, values and scales in a row.

A block has one piece in each tensor of pages. To move it in one large copy, its pieces are gathered into one row of
bytes, or scattered from it.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.triton_stub import tl, triton

WORDS: Mapping[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 1: torch.uint8}
"""Bytes that a thread copies at a time -> the dtype of this size."""


@dataclass(frozen=True)
class Pieces:
    """The places of the pieces of a block, in memory and in a row of bytes."""

    tensors: tuple[Tensor, ...]
    """Each [num_blocks, ...], contiguous within a block."""
    table: Tensor
    """int64 [4, pieces] on the device: address, stride of blocks, size, and place in the row; all but the address in
    words."""
    word: int
    """Bytes of a word: the largest that divides all of these."""
    longest: int
    """Words of the largest piece."""
    num_bytes: int
    """Bytes of all pieces of a block."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], row_bytes: int) -> "Pieces":
        """The pieces of these tensors, for rows of `row_bytes` bytes."""
        kept = tuple(tensor for tensor in tensors if tensor[0].numel())
        sizes = [tensor[0].nbytes for tensor in kept]
        places = [sum(sizes[:index]) for index in range(len(sizes))]
        strides = [tensor.stride(0) * tensor.element_size() for tensor in kept]
        addresses = [tensor.data_ptr() for tensor in kept]
        assert all(tensor[0].is_contiguous() for tensor in kept)
        assert sum(sizes) <= row_bytes
        word = next(w for w in WORDS if all(n % w == 0 for n in (*sizes, *strides, *addresses, row_bytes)))
        rows = [addresses, *([number // word for number in numbers] for numbers in (strides, sizes, places))]
        table = torch.tensor(rows, dtype=torch.int64, device=kept[0].device)
        return cls(kept, table, word, max(sizes) // word, sum(sizes))


def gather_blocks_torch(pieces: Pieces, blocks: Tensor, rows: Tensor) -> None:
    """Write block blocks[i] to rows[i]: [N], bytes [N, R]."""
    begin = 0
    for tensor in pieces.tensors:
        data = tensor.flatten(1).view(torch.uint8)
        rows[:, begin : begin + data.shape[1]] = data[blocks]
        begin += data.shape[1]


def scatter_blocks_torch(pieces: Pieces, blocks: Tensor, rows: Tensor) -> None:
    """Write rows[i] to block blocks[i]; no block may appear twice."""
    begin = 0
    for tensor in pieces.tensors:
        data = tensor.flatten(1).view(torch.uint8)
        data[blocks] = rows[:, begin : begin + data.shape[1]]
        begin += data.shape[1]


@triton.jit
def _copy_blocks_kernel(
    table_ptr: tl.tensor, blocks_ptr: tl.tensor, rows_ptr: tl.tensor, row_words: tl.tensor,
    num_pieces: tl.tensor,
    gather: tl.constexpr, chunk: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk of one piece of one block."""
    piece = tl.program_id(1)
    index = tl.program_id(2).to(tl.int64)
    stride = tl.load(table_ptr + num_pieces + piece)
    size = tl.load(table_ptr + 2 * num_pieces + piece)
    place = tl.load(table_ptr + 3 * num_pieces + piece)
    block = tl.load(blocks_ptr + index)  # int64
    base = tl.load(table_ptr + piece).to(rows_ptr.dtype)
    col = tl.program_id(0) * chunk + tl.arange(0, chunk)
    mask = col < size
    mine = base + block * stride + col
    row = rows_ptr + index * row_words + place + col
    if gather:
        tl.store(row, tl.load(mine, mask=mask), mask=mask)
    else:
        tl.store(mine, tl.load(row, mask=mask), mask=mask)


def gather_blocks_triton(pieces: Pieces, blocks: Tensor, rows: Tensor) -> None:
    """gather_blocks_torch in one kernel."""
    _launch(pieces, blocks, rows, gather=True)


def scatter_blocks_triton(pieces: Pieces, blocks: Tensor, rows: Tensor) -> None:
    """scatter_blocks_torch in one kernel."""
    _launch(pieces, blocks, rows, gather=False)


def _launch(pieces: Pieces, blocks: Tensor, rows: Tensor, *, gather: bool, chunk: int = 1024) -> None:
    assert blocks.dtype == torch.int64
    assert rows.dtype == torch.uint8
    assert rows.stride(1) == 1
    assert rows.shape[0] == blocks.shape[0]
    assert rows.shape[1] >= pieces.num_bytes
    if not blocks.numel():
        return
    words = rows.view(WORDS[pieces.word])
    chunk = min(chunk, triton.next_power_of_2(pieces.longest))
    grid = (triton.cdiv(pieces.longest, chunk), len(pieces.tensors), blocks.shape[0])
    _copy_blocks_kernel[grid](
        pieces.table, blocks, words, words.stride(0), len(pieces.tensors), gather=gather, chunk=chunk, num_warps=4
    )
