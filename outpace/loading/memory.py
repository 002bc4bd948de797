"""How much memory is left."""

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Of a GPU, or of this machine; None: nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: the system will page
        return None
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else 1024 * int(free)
