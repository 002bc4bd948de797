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
    """For each layer [num_blocks, block_size, kv_heads, key_dim]."""
    values: list[Tensor]
    """For each layer [num_blocks, block_size, kv_heads, value_dim]."""

    @property
    def num_blocks(self) -> int:
        """Pages there are."""
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in one page."""
        return self.keys[0].shape[1]


def allocate(
    heads: Sequence[tuple[int, int, int]],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> Pages:
    """Pages for layers with these (kv heads, size of a key, size of a value)."""

    def pages(count: int, size: int) -> Tensor:
        return torch.zeros(num_blocks, block_size, count, size, dtype=dtype, device=device)

    return Pages([pages(count, size) for count, size, _ in heads], [pages(count, size) for count, _, size in heads])


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // block_size)
