"""Rows quantized per token: by themselves, in norms and in activations; and products of such rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.kernels.activation import bias_act_torch, bias_act_triton, gated_act_torch, gated_act_triton
from outpace.kernels.invariant import bias_act_invariant, gated_act_invariant
from outpace.kernels.packed import Packed
from outpace.kernels.packed_matmul import PackedTiles
from outpace.kernels.quantize import LARGEST, empty_rows, quantize_rows_torch, quantize_rows_triton
from outpace.kernels.rms_norm import rms_norm_torch, rms_norm_triton
from outpace.kernels.scaled_linear import (
    scaled_linear_dequantized,
    scaled_linear_invariant_torch,
    scaled_linear_invariant_triton,
    scaled_linear_torch,
    scaled_linear_triton,
    scaled_matmul_triton,
    takes_library,
)
from tests.kernels.buffers import random_rows
from tests.kernels.packing import random_packed
from tests.kernels.tolerances import ROUNDING, on_gpu

KINDS = ("int8", "fp8")
DTYPES = (torch.float32, torch.bfloat16)


def numbers(values: Tensor, scales: Tensor) -> Tensor:
    """What quantized rows stand for."""
    return values.double() * scales.double()


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 4),
    width=st.integers(1, 40),
    size=st.sampled_from((0.0, 1e-44, 1e-38, 1e-20, 1.0, 300.0, 1e30)),
)
def test_within_half_a_step_of_x(kind: str, rows: int, width: int, size: float) -> None:
    x = torch.randn(rows, width) * size
    values, scales = quantize_rows_torch(x, kind)
    assert (values.shape, scales.shape) == ((rows, width), (rows, 1))
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert values.float().isfinite().all()
    step = scales.double() * (0.5 if kind == "int8" else 16.0)  # of fp8 between 256 and 448: 32
    assert ((numbers(values, scales) - x.double()).abs() <= step * 1.001).all()
    if size == 0.0:
        assert (scales == 1).all()


def test_outliers_and_the_largest(device: torch.device) -> None:
    x = torch.tensor([[0.1, -1000.0, 0.0, 3.0]], device=device)
    for kind in KINDS:
        values, scales = quantize_rows_torch(x, kind)
        assert values[0, 1].float() == -LARGEST[values.dtype]
        torch.testing.assert_close(numbers(values, scales)[0, 1].float(), x[0, 1])


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """The same bits; on a GPU, where a compiler joins products and sums, values on an edge may be the next ones."""
    if not got[0].is_cuda:
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        return
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0)
    steps = (got[0].view(torch.int8).int() - want[0].view(torch.int8).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).sum() <= 1 + steps.numel() // 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 1000])
def test_the_kernel(kind: str, dtype: torch.dtype, width: int, device: torch.device) -> None:
    x = random_rows((5, width), dtype, device)
    x[1] = 0
    x[2] *= 1e-30
    same(quantize_rows_triton(x, kind), quantize_rows_torch(x, kind))
    assert quantize_rows_triton(x[:0], kind)[0].shape == (0, width)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 256])
def test_norms_and_activations_write_the_same(kind: str, dtype: torch.dtype, width: int, device: torch.device) -> None:
    """As if their result had been quantized after them; a kernel may round it to the neighbour first."""
    x, add = random_rows((5, width), dtype, device), random_rows((5, width), dtype, device)
    weight = torch.randn(width, device=device).to(dtype)
    pairs = random_rows((5, 2 * width), dtype, device)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        ((rms_norm_torch, rms_norm_triton), (x, weight, 1e-5), {"add": add}),
        ((rms_norm_torch, rms_norm_triton), (x, None, 1e-5), {}),
        ((gated_act_torch, gated_act_invariant, gated_act_triton), (pairs, "silu"), {}),
        ((bias_act_torch, bias_act_invariant, bias_act_triton), (x, weight, "gelu"), {}),
    ]
    for ops, args, options in calls:
        for op in ops:
            plain = op(*args, **options)
            values, scales = empty_rows(5, width, kind, device)
            got = op(*args, **options, out=values, scales=scales)
            assert got is values
            same((values, scales), quantize_rows_torch(plain, kind))


def test_what_is_refused(device: torch.device) -> None:
    x, (values, scales) = torch.zeros(2, 8, device=device), empty_rows(2, 8, "int8", device)
    for op in (rms_norm_torch, rms_norm_triton):
        with pytest.raises(AssertionError, match="go with an out"):
            op(x, None, 1e-5, scales=scales)
        with pytest.raises(AssertionError, match="neither int8 nor"):
            op(x, None, 1e-5, out=x, scales=scales)
    with pytest.raises(AssertionError, match="float32"):
        gated_act_triton(torch.zeros(2, 16, device=device), "silu", out=values, scales=scales[:1])
    with pytest.raises(AssertionError, match="not to 'int4'"):
        quantize_rows_torch(x, "int4")


def check_product(
    product: Any, kind: str, weight: Packed, rows: int, dtype: torch.dtype, device: torch.device, **more: Any
) -> None:
    """Against the formula in fp64, with bias and sum and without."""
    outputs, depth = weight.shape
    values, scales = quantize_rows_torch(torch.randn(rows, depth, device=device), kind)
    bias, add = torch.randn(outputs, device=device).to(dtype), random_rows((rows, outputs), dtype, device)
    want = numbers(values, scales) @ weight.dequantized(torch.float32).double().T
    for options, total in (({}, want), ({"bias": bias, "add": add}, want + bias.double() + add.double())):
        got = product(values, scales, weight, dtype=dtype, **options, **more)
        assert got.dtype == dtype
        unit = max(ROUNDING[dtype], 2.0**-12 if kind == "fp8" and values.is_cuda else 0.0)  # sums of 14 bits: see there
        tolerance = unit * max(1.0, float(total.abs().max()))
        torch.testing.assert_close(got.double(), total, rtol=0, atol=2 * tolerance)
    out = add.clone()
    assert product(values, scales, weight, dtype=dtype, add=out, out=out, **more) is out


EVERY = (scaled_linear_dequantized, scaled_linear_torch, scaled_linear_invariant_torch, scaled_linear_triton)


@pytest.mark.parametrize("product", [*EVERY, scaled_linear_invariant_triton])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "block"), [(96, 1), (96, 9), (32, 4)])
def test_products_of_quantized_rows(product: Any, kind: str, group: int, block: int, device: torch.device) -> None:
    for rows, dtype in ((1, torch.float32), (5, torch.bfloat16), (20, torch.float32)):
        weight = random_packed(kind, (9, 96), group, block, device=device)
        check_product(product, kind, weight, rows, dtype, device)


@pytest.mark.parametrize("product", [scaled_linear_torch, scaled_linear_invariant_torch])
def test_zeros_and_odd_groups_on_a_cpu(product: Any) -> None:
    cpu = torch.device("cpu")
    for rows, group in ((1, 50), (3, 7), (17, 16)):
        check_product(product, "int8", random_packed("int8", (6, 50), group, zero=True), rows, torch.float32, cpu)


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("product", [scaled_linear_triton, scaled_linear_invariant_triton])
def test_what_the_kernel_does_not_take_is_multiplied_otherwise(product: Any, device: torch.device) -> None:
    for weight in (
        random_packed("int4", (6, 64), 32, device=device),
        random_packed("int8", (6, 64), 64, zero=True, device=device),
        random_packed("int8", (6, 60), 20, device=device),
    ):
        check_product(product, "int8", weight, 3, torch.float32, device)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_widths_and_several_tiles(kind: str, device: torch.device) -> None:
    weight = random_packed(kind, (37, 133), 133, device=device)
    check_product(scaled_matmul_triton, kind, weight, 35, torch.bfloat16, device, tiles=PackedTiles(16, 16, 32))


@pytest.mark.parametrize("product", [scaled_linear_invariant_torch, scaled_linear_invariant_triton])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_others(product: Any, kind: str, device: torch.device) -> None:
    device = device if product is scaled_linear_invariant_triton else torch.device("cpu")
    weight = random_packed(kind, (9, 96), 96, device=device)
    values, scales = quantize_rows_torch(torch.randn(40, 96, device=device), kind)
    both = product(values, scales, weight)
    for row in (0, 7, 39):
        assert torch.equal(product(values[row : row + 1], scales[row : row + 1], weight), both[row : row + 1])


def test_many_rows_of_fp8_are_for_the_library() -> None:
    values = torch.zeros(300, 64, dtype=torch.float8_e4m3fn)
    weight = random_packed("fp8", (32, 64), 64)
    assert takes_library(values, weight, torch.bfloat16)
    assert not takes_library(values[:200], weight, torch.bfloat16)
    assert not takes_library(values, random_packed("fp8", (32, 64), 32), torch.bfloat16)
    assert not takes_library(values, weight, torch.float16)
    assert not takes_library(values.to(torch.int8), random_packed("int8", (32, 64), 64), torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_programs_share_the_depth(kind: str, device: torch.device) -> None:
    weight = random_packed(kind, (9, 200), 200, device=device)
    for split in (2, 3):
        tiles = PackedTiles(16, 16, 32, split=split)
        check_product(scaled_matmul_triton, kind, weight, 5, torch.bfloat16, device, tiles=tiles)


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "block"), [(4096, 1), (128, 128)])
def test_layers_of_an_8b(kind: str, group: int, block: int, device: torch.device) -> None:
    """Real widths, at rows of our kernel and of the library's; and rows that do not depend on the batch."""
    weight = random_packed(kind, (6144, 4096), group, block, device=device)
    for rows in (1, 16, 64, 256, 300):
        check_product(scaled_linear_triton, kind, weight, rows, torch.bfloat16, device)
        values, scales = quantize_rows_torch(torch.randn(rows, 4096, device=device), kind)
        both = scaled_linear_invariant_triton(values, scales, weight, dtype=torch.bfloat16)
        assert torch.equal(
            scaled_linear_invariant_triton(values[:1], scales[:1], weight, dtype=torch.bfloat16), both[:1]
        )
