"""Integer products of rows of 16 and 32 bits with int8 weights, against the formula in fp64 and the reference."""

import pytest
import torch

from outpace.kernels.packed_digits import digits_linear, takes_digits
from outpace.kernels.packed_linear import packed_linear_dequantized, packed_linear_torch
from tests.kernels.buffers import Output
from tests.kernels.packing import random_packed
from tests.kernels.test_gemv import oracle, random_options
from tests.kernels.test_packed_linear import assert_near
from tests.kernels.tolerances import ROUNDING

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "zero"), [(1, False), (1, True), (10**6, False), (10**6, True)])
def test_odd_shapes(dtype: torch.dtype, block: int, zero: bool) -> None:
    for rows, outputs, depth in ((1, 1, 1), (1, 37, 129), (3, 16, 33), (2, 5, 1536), (20, 9, 64)):
        weight = random_packed("int8", (outputs, depth), depth, min(block, outputs), zero=zero)
        x = torch.randn(rows, depth).to(dtype)
        assert takes_digits(x, weight)
        options = random_options((rows, outputs, depth), dtype, CPU, gated=False)
        want, out = (
            oracle(x, weight.dequantized(torch.float32), **options),
            Output.like(torch.empty(rows, outputs, dtype=dtype)),
        )
        assert packed_linear_torch(x, weight, out=out.view, **options) is out.view
        assert_near(out.checked(), want, 8)  # a norm of its own rounds its result


def test_what_a_row_may_hold() -> None:
    """Zeros, numbers near the ends of fp32, and one that is much larger than the others: as exact as fp32."""
    weight = random_packed("int8", (11, 96), 96)
    x = torch.randn(6, 96)
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 1e30
    x[3, 5] = 5000.0
    x[4, 1:] = 0
    x[5, ::2] *= 1e-6
    want = x.double() @ weight.dequantized(torch.float64).T
    size = x.abs().amax(dim=1, keepdim=True).double()
    assert ((digits_linear(x, weight) - want).abs() <= 2e-6 * size).all()
    assert torch.isfinite(digits_linear(x, weight)).all()
    for seed in range(50):  # the largest number itself, however it is rounded
        row = torch.full((1, 96), torch.rand(()).item() * 10.0**seed * 1e-28)
        assert_near(digits_linear(row, weight) / row[0, 0], (row.sign().double() @ weight.dequantized(torch.float64).T))
    x[0, 0] = torch.nan
    assert digits_linear(x[:1], weight).isnan().all()
    assert digits_linear(x, weight)[0].isnan().any()
    assert not digits_linear(x, weight)[1:].isnan().any()


def test_two_digits_are_enough_for_16_bits() -> None:
    weight, x = random_packed("int8", (40, 576), 576), torch.randn(4, 576).bfloat16()
    want = x.double() @ weight.dequantized(torch.float64).T
    error = (digits_linear(x, weight) - want).abs().max()
    assert error < ROUNDING[torch.bfloat16] / 20 * want.abs().max()


@pytest.mark.parametrize(
    ("kind", "group", "block"), [("int8", 32, 1), ("int8", 96, 4), ("int4", 32, 1), ("fp8", 96, 1)]
)
def test_others_are_dequantized(kind: str, group: int, block: int) -> None:
    weight, x = random_packed(kind, (12, 96), group, block), torch.randn(3, 96)
    assert not takes_digits(x, weight)
    assert torch.equal(packed_linear_torch(x, weight), packed_linear_dequantized(x, weight))
    assert packed_linear_torch(x[:0], weight).shape == (0, 12)


def test_a_gated_activation_and_a_norm() -> None:
    weight, x = random_packed("int8", (26, 33), 33), torch.randn(2, 33)
    options = random_options((2, 13, 33), torch.float32, CPU, gated=True)
    assert_near(packed_linear_torch(x, weight, **options), packed_linear_dequantized(x, weight, **options).double(), 8)
