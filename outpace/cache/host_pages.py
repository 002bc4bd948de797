"""Pages in host memory: all layers' keys, values and scales of a block are one contiguous row of bytes there."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outpace.cache.kv_cache import Pages
from outpace.kernels.block_copy import Pieces, gather_blocks, scatter_blocks

STAGING = 64 << 20
"""Most bytes of a staging buffer on a GPU: copies as long as this run at the full rate of the link."""
Pairs = Sequence[tuple[int, int]]


class HostPages:
    """Blocks in host memory, and the copies between them and pages."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        """memory: [num_blocks, row_bytes], uint8; page-locked if the device is a GPU."""
        self.memory = memory
        self.num_blocks, self.row_bytes = memory.shape
        self.device = device
        self.per_copy = max(1, min(self.num_blocks, STAGING // self.row_bytes))
        """Blocks that are copied at once."""
        self._pieces: Pieces | None = None

    def bind(self, pages: Pages) -> None:
        """Copy from and to these pages from now on."""
        self._pieces = Pieces.of(list(pages.tensors()), self.row_bytes)

    def staging(self) -> Tensor:
        """A buffer through which `store` and `fetch` may copy, one of them at a time."""
        return torch.empty(self.per_copy, self.row_bytes, dtype=torch.uint8, device=self.device)

    def store(self, pairs: Pairs, staging: Tensor) -> None:
        """Copy at most `per_copy` (block, host block)s out, on the current stream."""
        assert self._pieces is not None, "bound"
        gather_blocks(self._pieces, self._ids(block for block, _ in pairs), staging[: len(pairs)])
        for begin, end in runs([host for _, host in pairs]):
            first = pairs[begin][1]
            self.memory[first : first + end - begin].copy_(staging[begin:end], non_blocking=True)

    def fetch(self, pairs: Pairs, staging: Tensor) -> None:
        """Copy at most `per_copy` (host block, block)s back in, on the current stream."""
        assert self._pieces is not None, "bound"
        for begin, end in runs([host for host, _ in pairs]):
            first = pairs[begin][0]
            staging[begin:end].copy_(self.memory[first : first + end - begin], non_blocking=True)
        scatter_blocks(self._pieces, self._ids(block for _, block in pairs), staging[: len(pairs)])

    def _ids(self, blocks: Iterator[int]) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.tensor(list(blocks), dtype=torch.int64, pin_memory=pinned).to(self.device, non_blocking=True)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The (begin, end)s of longest pieces in which each number is one more than the one before it."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield begin, end
            begin = end
