"""Host memory that a GPU reads and writes in place, over the link, as if it were its own."""

from typing import Any

import torch
from torch import Tensor

from outpace.offload.store import aligned


class _Memory:
    """Page-locked host memory as others may take it: by its address, which is the same for the GPU."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # held as long as a tensor made of this is
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def mapped(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, for kernels on `device`; on a CPU they are what all others are."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = aligned(size, pinned=device.type == "cuda")
    if device.type == "cuda":
        with torch.cuda.device(device):
            memory = torch.as_tensor(_Memory(memory), device=device)
    return memory[:size].view(dtype).view(shape)
