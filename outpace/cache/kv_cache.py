"""Keys and values of every layer, in pages of a fixed number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 64  # tokens in a page: long enough for whole tiles of the attention kernels


@dataclass(frozen=True)
class Pages:
    """The pages of all layers; page p of a sequence is page p in every layer."""

    keys: list[Tensor]
    """For each layer [num_blocks, block_size, kv_heads, head_dim]."""
    values: list[Tensor]

    @property
    def num_blocks(self) -> int:
        """Pages there are."""
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in one page."""
        return self.keys[0].shape[1]


def allocate(
    heads: Sequence[tuple[int, int]],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> Pages:
    """Pages for layers with these (kv heads, head size)."""
    shapes = [(num_blocks, block_size, count, size) for count, size in heads]
    keys, values = ([torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2))
    return Pages(keys, values)


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // block_size)
