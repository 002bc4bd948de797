"""What launchers ask: whether a kernel may start while the one in front ends, how many SMs there are, row strides.

NVIDIA calls the overlap of two kernels programmatic dependent launch (PDL).
"""

from functools import cache
from typing import Any

import torch

FEW_ROWS = 16  # as many as `few_rows` takes


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels of this device can start before the one in front has ended (Hopper and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def sm_count(device: torch.device) -> int:
    """The number of SMs of a device; 1 where there are none (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def few_overlap(rows: int, x: torch.Tensor) -> bool:
    """Whether a kernel over this many rows of x overlaps the one in front.

    Steps of so few 16-bit rows consist of our own kernels. In larger steps the products are a library's, which does not
    overlap.
    """
    return rows <= FEW_ROWS and x.element_size() == 2 and has_pdl(x.device)


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Options of a launch whose kernel has a parameter `pdl`; it must wait (`gdc_wait`) before it reads or writes."""
    return {"pdl": True, "launch_pdl": True} if pdl else {"pdl": False}


def row_stride(x: torch.Tensor | None) -> int:
    """Distance of the rows of x; 0 for a single row, so that its stride does not compile another variant."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
