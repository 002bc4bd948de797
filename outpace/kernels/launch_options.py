"""Helpers of launchers: whether a kernel may start before the previous one ends, the number of SMs, row strides.

NVIDIA calls the overlap of two kernels programmatic dependent launch (PDL).
"""

from functools import cache
from typing import Any

import torch

MAX_ROWS = 16  # of x, in the kernels for few rows


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels of this device can start before the previous one has ended (Hopper and later)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def sm_count(device: torch.device) -> int:
    """The number of SMs of a device; 1 where there are none (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def few_overlap(rows: int, x: torch.Tensor) -> bool:
    """Whether a kernel between the products of a step overlaps the previous kernel: with few 16-bit rows.

    Our own kernels then compute the products too. With more rows a library does, next to which nothing overlaps but
    attention, routing and experts, which choose for themselves.
    """
    return rows <= MAX_ROWS and x.element_size() == 2 and has_pdl(x.device)


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Options of a launch whose kernel has a parameter `pdl`. The kernel must wait (`gdc_wait`) before it writes, and
    before it reads anything but weights."""
    return {"pdl": True, "launch_pdl": True} if pdl else {"pdl": False}


def row_stride(x: torch.Tensor | None) -> int:
    """Row stride of x; 0 for a single row, so that its stride does not compile another variant."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
