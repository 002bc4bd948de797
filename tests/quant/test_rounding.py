"""Weights rounded by every scheme: within half a step of what they were, whatever their values and sizes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.quant.rounding import ELEMENTS, as_packed, quantized
from outpace.quant.scheme import Scheme

INTEGERS = [
    Scheme(values, group, per_tensor, symmetric)  # type: ignore[arg-type]
    for values, (group, per_tensor), symmetric in itertools.product(
        ("int8", "int4"), ((None, False), (16, False), (None, True)), (True, False)
    )
]
FLOATS = [Scheme("fp8"), Scheme("fp8", 16), Scheme("fp8", per_tensor=True)]
STORED = [
    Scheme("int8", scales=torch.bfloat16),
    Scheme("int8", 16, scales=torch.float32),
    Scheme("int4", 16, symmetric=False, scales=torch.bfloat16),
    Scheme("fp8", scales=torch.float16),
]
"""With scales in another dtype than usual, as checkpoints have them."""


def at_places(numbers: Tensor, weight: Tensor, scheme: Scheme) -> Tensor:
    """Scales or zeros at each place of a weight."""
    found = numbers.float().expand(*weight.shape[:-1], numbers.shape[-1])
    return found.repeat_interleave(scheme.group or weight.shape[-1], dim=-1)[..., : weight.shape[-1]]


def check(weight: Tensor, scheme: Scheme) -> None:
    """No value is further away than half a step, or than fp8's own rounding."""
    made = quantized(weight, scheme)
    found = as_packed(made, scheme, (weight.shape[-2], weight.shape[-1])).dequantized(torch.float32)
    exact, step = weight.float(), at_places(made["_scale"], weight, scheme)
    assert found.isfinite().all()
    if scheme.values == "fp8":
        assert ((found - exact).abs() <= exact.abs() / 16 + step * 2.0**-10 + 1e-30).all()
        return
    assert ((found - exact).abs() <= 0.5001 * step + 1e-37).all()


@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOATS, *STORED], ids=repr)
@pytest.mark.parametrize("shape", [(1, 16), (5, 33), (64, 48), (3, 7, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_half_a_step(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(torch.randn(shape).to(dtype), scheme)


@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOATS], ids=str)
def test_values_that_are_awkward(scheme: Scheme) -> None:
    rows = [
        torch.zeros(32),
        torch.full((32,), 3.0),
        torch.full((32,), -0.25),
        torch.full((32,), 1e-40),
        torch.randn(32) * 1e-5,
        torch.randn(32).index_fill(0, torch.tensor([7]), 1e4),
        torch.randn(32).abs(),
    ]
    for row in rows:
        check(row[None], scheme)
    check(torch.stack(rows), scheme)


NUMBERS = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, 1e-40, -1e-40, 1e-7, 6e4, -6e4, 3e38])
"""Zeros, denormals and outliers are among them."""


@given(
    st.sampled_from([*INTEGERS, *FLOATS]),
    st.lists(NUMBERS, min_size=1, max_size=70) | st.builds(lambda x, n: [x] * n, NUMBERS, st.integers(1, 70)),
    st.integers(1, 4),
)
def test_any_values(scheme: Scheme, values: list[float], rows: int) -> None:
    weight = torch.tensor([values] * rows)
    if weight.abs().max() < 1e38:
        weight *= torch.arange(1, rows + 1)[:, None]
    if scheme.kept == torch.float16 and weight.abs().max() > 4e5:  # no scale of a group is large enough
        assert (
            as_packed(quantized(weight, scheme), scheme, (rows, len(values)))
            .dequantized(torch.float32)
            .isfinite()
            .all()
        )
    else:
        check(weight, scheme)


@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOATS], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_tell_of_weights_that_are_not_finite(scheme: Scheme, value: float) -> None:
    weight = torch.ones(4, 32)
    weight[1, 5] = value
    assert not quantized(weight, scheme)["_scale"].isfinite().all()


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int4", 16), Scheme("fp8", per_tensor=True)], ids=str)
def test_rows_in_pieces_are_the_rows_at_once(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 37, 48)
    assert weight.numel() < ELEMENTS["cpu"]
    whole = quantized(weight, scheme)
    monkeypatch.setitem(ELEMENTS, "cpu", 48 * 5)
    for end, tensor in quantized(weight, scheme).items():
        assert torch.equal(tensor.view(torch.uint8), whole[end].view(torch.uint8))


@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOATS], ids=str)
def test_shapes_are_what_the_scheme_says(scheme: Scheme) -> None:
    made = quantized(torch.randn(3, 6, 40), scheme)
    assert {end: (tuple(tensor.shape), tensor.dtype) for end, tensor in made.items()} == scheme.tensors((3, 6, 40))
