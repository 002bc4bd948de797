"""How far apart two computations of one value may be, the only comparison of the kernel tests, and what needs a GPU."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

# The relative distance that one rounding to the dtype can open: a unit in the last place. Inside, all is fp32, whose
# sums differ by their order.
ROUNDING: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
)
FP32_SUM = 4e-6
DTYPES = tuple(ROUNDING)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, roundings: int = 1, magnitude: float = 0.0) -> None:
    """Equal up to `roundings` roundings of the result, and one of terms of this magnitude that may cancel in it."""
    assert actual.shape == expected.shape
    unit = ROUNDING[actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=roundings * unit, atol=FP32_SUM + magnitude * unit, equal_nan=False
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise equal, where no arithmetic or the same arithmetic is done."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def on_gpu(test: Callable[..., Any]) -> Any:
    """Marks a test that needs an NVIDIA GPU."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.mark.gpu(needs(test))
