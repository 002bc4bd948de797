"""Pages in host memory: keys, values and scales of all layers of a block are one contiguous row of bytes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outpace.cache.kv_cache import Pages
from outpace.kernels.block_copy import Pieces
from outpace.kernels.dispatch import for_device

STAGING = 64 << 20
"""Size of a staging buffer on a GPU; copies of this size reach the full rate of the link."""
Pairs = Sequence[tuple[int, int]]


class HostPages:
    """Blocks in host memory, and the copies between them and pages."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        """memory: [num_blocks, row_bytes], uint8; page-locked if the device is a GPU."""
        self.memory = memory
        self.num_blocks, self.row_bytes = memory.shape
        self.device = device
        self.per_copy = max(1, min(self.num_blocks, STAGING // self.row_bytes))
        """Blocks per copy."""
        self._pieces: Pieces | None = None

    def bind(self, pages: Pages) -> None:
        """Use these device pages as the other end of the copies."""
        self._pieces = Pieces.of(list(pages.tensors()), self.row_bytes)

    def staging(self) -> Tensor:
        """A staging buffer for `store` or `fetch`, for one of them at a time."""
        return torch.empty(self.per_copy, self.row_bytes, dtype=torch.uint8, device=self.device)

    def store(self, pairs: Pairs, staging: Tensor) -> None:
        """Copy up to `per_copy` pairs (block, host block) to host memory, on the current stream."""
        assert self._pieces is not None, "bound"
        gather = for_device("gather_blocks", self.device)
        gather(self._pieces, self._ids(block for block, _ in pairs), staging[: len(pairs)])
        for begin, end in runs([host for _, host in pairs]):
            first = pairs[begin][1]
            self.memory[first : first + end - begin].copy_(staging[begin:end], non_blocking=True)

    def fetch(self, pairs: Pairs, staging: Tensor) -> None:
        """Copy up to `per_copy` pairs (host block, block) to the device, on the current stream."""
        assert self._pieces is not None, "bound"
        for begin, end in runs([host for host, _ in pairs]):
            first = pairs[begin][0]
            staging[begin:end].copy_(self.memory[first : first + end - begin], non_blocking=True)
        scatter = for_device("scatter_blocks", self.device)
        scatter(self._pieces, self._ids(block for _, block in pairs), staging[: len(pairs)])

    def _ids(self, blocks: Iterator[int]) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.tensor(list(blocks), dtype=torch.int64, pin_memory=pinned).to(self.device, non_blocking=True)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The (begin, end) of each longest run of consecutive numbers."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield begin, end
            begin = end
