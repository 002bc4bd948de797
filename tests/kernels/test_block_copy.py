import pytest
import torch
from torch import Tensor

from outpace.kernels.block_copy import (
    Pieces,
    gather_blocks_torch,
    gather_blocks_triton,
    scatter_blocks_torch,
    scatter_blocks_triton,
)

NUM_BLOCKS = 7
SHAPES: dict[str, tuple[list[tuple[tuple[int, ...], torch.dtype]], int]] = {
    "even": ([((16, 2, 64), torch.bfloat16)] * 4, 0),
    "odd sizes": ([((3, 1, 5), torch.int8), ((1,), torch.int8), ((257, 3), torch.int8)], 3),
    "four bytes": ([((3, 5), torch.float32), ((1, 3), torch.float32)], 4),
    "two bytes": ([((4, 1, 3), torch.bfloat16), ((5, 1, 257), torch.bfloat16)], 0),
    "with scales": ([((4, 2, 8), torch.int8), ((4, 2, 4), torch.int8), ((2, 2, 4), torch.float32)], 0),
    "fp8": ([((4, 2, 8), torch.float8_e4m3fn), ((2, 2, 4), torch.float32)], 64),
    "padded": ([((16, 2, 64), torch.float32), ((16, 2, 32), torch.float32)], 4096),
    "an empty piece": ([((4, 2, 8), torch.float32), ((4, 2, 0), torch.float32)], 0),
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of any bits, which a copy has to keep: some are no numbers."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.numel():
        made.view(torch.uint8).copy_(torch.randint(0, 256, made.view(torch.uint8).shape))
    return made


def as_bytes(tensors: list[Tensor], block: int) -> Tensor:
    """What a row of this block must be, put together another way."""
    return torch.cat([each[block].flatten().view(torch.uint8) for each in tensors if each[block].numel()])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 3, 0])
def test_blocks_are_gathered_and_scattered_bit_for_bit(name: str, count: int, device: torch.device) -> None:
    shapes, padding = SHAPES[name]
    tensors = [random_bytes((NUM_BLOCKS, *shape), dtype, device) for shape, dtype in shapes]
    size = sum(tensor[0].nbytes for tensor in tensors)
    pieces = Pieces.of(tensors, size + padding)
    assert pieces.num_bytes == size
    blocks = torch.randperm(NUM_BLOCKS, device=device)[:count]
    for gather, scatter in ((gather_blocks_torch, scatter_blocks_torch), (gather_blocks_triton, scatter_blocks_triton)):
        rows = torch.full((count, size + padding), 77, dtype=torch.uint8, device=device)
        gather(pieces, blocks, rows)
        for row, block in zip(rows, blocks.tolist(), strict=True):
            assert torch.equal(row[:size], as_bytes(tensors, block))
            assert row[size:].eq(77).all(), "bytes behind the block were written"
        before = [as_bytes(tensors, block) for block in range(NUM_BLOCKS)]
        targets = torch.randperm(NUM_BLOCKS, device=device)[:count]
        scatter(pieces, targets, rows)
        expected = dict(enumerate(before)) | {
            target: rows[index, :size] for index, target in enumerate(targets.tolist())
        }
        for block, wanted in expected.items():
            assert torch.equal(as_bytes(tensors, block), wanted), "another block was written, or this one was not"


def test_the_words_are_as_large_as_the_pieces_allow(device: torch.device) -> None:
    words = {name: shapes for name, (shapes, _) in SHAPES.items()}
    found = {
        name: Pieces.of([random_bytes((2, *shape), dtype, device) for shape, dtype in shapes], 1 << 20).word
        for name, shapes in words.items()
    }
    assert found["even"] == 8
    assert found["four bytes"] == 4
    assert found["odd sizes"] == 1
