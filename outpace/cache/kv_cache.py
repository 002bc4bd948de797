"""Keys and values of every layer, in pages of a fixed number of tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64  # bytes, to which tensors are aligned
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
        return _zeros((num_blocks, block_size, count, size), dtype, device)

    return Pages([pages(count, size) for count, size, _ in heads], [pages(count, size) for count, _, size in heads])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system makes them when they are first written, so that a large cache costs nothing at start.

    torch.zeros writes them all at once, which took 1.4 s for 4 GiB; numpy asks the system for empty memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    begin = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


def block_bytes(heads: Sequence[tuple[int, int, int]], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Memory of one page in all layers."""
    return sum(count * (key + value) for count, key, value in heads) * block_size * dtype.itemsize


class HostPages:
    """Pages in page-locked host memory, for requests that had to give way."""

    def __init__(self, like: Pages, num_blocks: int) -> None:
        def host(pages: Tensor) -> Tensor:
            shape = (num_blocks, *pages.shape[1:])
            return torch.empty(shape, dtype=pages.dtype, pin_memory=pages.device.type == "cuda")

        self._pages = Pages([host(pages) for pages in like.keys], [host(pages) for pages in like.values])

    def store(self, pages: Pages, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block)s out."""
        for mine, theirs in self._layers(pages):
            for block, host in pairs:
                mine[host].copy_(theirs[block], non_blocking=True)

    def fetch(self, pages: Pages, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, device block)s back in."""
        for mine, theirs in self._layers(pages):
            for host, block in pairs:
                theirs[block].copy_(mine[host], non_blocking=True)

    def _layers(self, pages: Pages) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self._pages.keys, pages.keys, strict=True)
        yield from zip(self._pages.values, pages.values, strict=True)


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // block_size)
