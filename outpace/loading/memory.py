"""Reads how much memory is free on a GPU or this machine."""

import torch

from outpace.offload.store_memory import free_memory


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a GPU, or of this machine; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()
