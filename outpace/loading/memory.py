"""Reads how much memory is free on a GPU or this machine."""

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a GPU, or of this machine; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else 1024 * int(free)
