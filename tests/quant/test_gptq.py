"""GPTQ: the outputs for calibration inputs change less than with rounding to nearest, whatever the inputs are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.quant.gptq import Inputs, gptq
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.scheme import Scheme

SCHEMES = [Scheme("int4", 16), Scheme("int4", 16, symmetric=False), Scheme("int8"), Scheme("fp8"), Scheme("int4")]


def correlated(rows: int, columns: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns // 4) @ torch.randn(columns // 4, columns) + 0.1 * torch.randn(rows, columns)


def change(weight: Tensor, made: dict[str, Tensor], scheme: Scheme, x: Tensor) -> float:
    packed = as_packed(made, scheme, (weight.shape[0], weight.shape[1]))
    return float((x @ (packed.dequantized(torch.float32) - weight).t()).norm())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("columns", [48, 160])
def test_outputs_change_less(scheme: Scheme, columns: int) -> None:
    x = correlated(400, columns)
    weight = torch.randn(24, columns)
    rounding, compensated = quantized(weight, scheme), gptq(weight, Inputs(x), scheme)
    assert change(weight, compensated, scheme, x) < 0.6 * change(weight, rounding, scheme, x)
    assert compensated.keys() == rounding.keys()
    for end, tensor in rounding.items():
        assert (compensated[end].shape, compensated[end].dtype) == (tensor.shape, tensor.dtype)
    if scheme.values != "int4":
        assert torch.equal(compensated["_scale"], rounding["_scale"])


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("fp8")], ids=str)
def test_inputs_that_have_nothing_in_common_give_rounding_to_nearest(scheme: Scheme) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 32)
    made = gptq(weight, Inputs(torch.eye(32) * torch.arange(1, 33)), scheme)
    for end, tensor in quantized(weight, scheme).items():
        assert torch.equal(made[end].view(torch.uint8), tensor.view(torch.uint8))


@settings(max_examples=40)
@given(
    st.sampled_from(SCHEMES),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([0.0, 1e-40, 1e-6, 1.0, 1e4]),
    st.sampled_from([0.0, 1e-20, 1.0, 1e6]),
)
def test_no_nan(scheme: Scheme, columns: int, rows: int, tokens: int, size: float, inputs: float) -> None:
    """Odd sizes, zeros, denormals, outliers, dead columns, fewer tokens than columns."""
    torch.manual_seed(0)
    weight, x = torch.randn(rows, columns) * size, torch.randn(tokens, columns) * inputs
    weight[:, 0] *= 100
    x[:, columns // 2] = 0
    made = gptq(weight, Inputs(x), scheme)
    assert as_packed(made, scheme, (rows, columns)).dequantized(torch.float32).isfinite().all()
