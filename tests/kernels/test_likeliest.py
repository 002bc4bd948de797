import pytest
import torch

from outpace.kernels.likeliest import BLOCK, write_likeliest_torch, write_likeliest_triton
from tests.kernels.buffers import random_rows
from tests.kernels.tolerances import DTYPES, assert_equal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 17, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("count", [1, 3])
def test_the_kernels_are_the_reference(count: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = random_rows((count, vocab), dtype, device, gap=7)  # 16-bit logits are often equal: the first one counts
    rows, places = torch.tensor([4, 0, 2])[:count].to(device).int(), torch.tensor([1, 5, 0])[:count].to(device).int()
    states = [torch.full((5, 6), -1, dtype=torch.int32, device=device) for _ in range(2)]
    want = write_likeliest_torch(logits, states[0], rows, places)
    assert_equal(write_likeliest_triton(logits, states[1], rows, places), want)
    assert_equal(states[1], states[0])
    assert int((states[0] >= 0).sum()) == count


def test_ties_infinities_and_what_is_no_number(device: torch.device) -> None:
    logits = torch.zeros(4, 2 * BLOCK, device=device)
    logits[0, [BLOCK - 1, BLOCK, 7]] = 3.0
    logits[1] = float("-inf")
    logits[2, [9, 5000]] = float("inf")
    logits[3, 6000] = float("nan")
    state, index = torch.zeros(4, 1, dtype=torch.int32, device=device), torch.arange(4, device=device)
    found = write_likeliest_triton(logits, state, index, torch.zeros_like(index))
    assert found.tolist() == [7, 0, 9, 6000]
    assert state[:, 0].tolist() == [7, 0, 9, 6000]


def test_no_rows(device: torch.device) -> None:
    state, none = torch.zeros(2, 3, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    assert write_likeliest_triton(torch.zeros(0, 9, device=device), state, none, none).shape == (0,)
