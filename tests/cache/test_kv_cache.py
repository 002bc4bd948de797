"""Pages of keys and values: what they cost before they are used."""

import os
from pathlib import Path

import pytest
import torch

from outpace.cache.kv_cache import allocate, block_bytes

CPU = torch.device("cpu")


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_item_16_pages_take_memory_when_they_are_written() -> None:
    heads = [(4, 64, 64)] * 4
    num_blocks = 2**30 // block_bytes(heads, torch.float32)
    before = resident()
    pages = allocate(heads, num_blocks, torch.float32, CPU)
    assert resident() - before < 2**28
    for page in (*pages.keys, *pages.values):
        page[num_blocks // 2] = 1.0
        assert page[num_blocks // 2 - 1 : num_blocks // 2 + 2].sum() == page[0].numel(), "its neighbours are not zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_are_zeros_of_the_dtype_aligned_as_torch_aligns(dtype: torch.dtype) -> None:
    pages = allocate([(1, 3, 5), (2, 4, 4)], 7, dtype, CPU, block_size=2)
    assert [tuple(page.shape) for page in (*pages.keys, *pages.values)] == [
        *((7, 2, 1, 3), (7, 2, 2, 4)),
        *((7, 2, 1, 5), (7, 2, 2, 4)),
    ]
    for page in (*pages.keys, *pages.values):
        assert page.dtype is dtype
        assert page.is_contiguous()
        assert page.data_ptr() % 64 == 0
        assert not page.any()
