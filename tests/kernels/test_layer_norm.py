import pytest
import torch
import torch.nn.functional as F

from outpace.kernels.layer_norm import layer_norm_ref, layer_norm_triton
from tests.kernels.buffers import Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal

SHAPES = [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (1, 4097)]
EPS = 1e-5


def vector(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(width, device=device).to(dtype)


@pytest.mark.parametrize(("residual", "input_bias"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_ref(
    shape: tuple[int, int], dtype: torch.dtype, residual: bool, input_bias: bool, device: torch.device
) -> None:
    x = random_rows(shape, dtype, device)
    weight, bias = vector(shape[1], dtype, device), vector(shape[1], dtype, device)
    r = random_rows(shape, dtype, device, gap=3) if residual else None
    b = vector(shape[1], dtype, device) if input_bias else None
    want, want_sum = layer_norm_ref(x, weight, bias, EPS, residual=r, input_bias=b)
    out, total = Output.like(x), Output.like(x, gap=7)
    adds = residual or input_bias
    got, got_sum = layer_norm_triton(
        x, weight, bias, EPS, residual=r, input_bias=b, out=out.view, residual_out=total.view if adds else None
    )
    assert got is out.view
    assert_close(out.checked(), want)
    assert got_sum is (total.view if adds else x)
    assert_equal(total.checked() if adds else got_sum, want_sum)


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_bias_are_optional(dtype: torch.dtype, affine: str, device: torch.device) -> None:
    x = random_rows((5, 257), dtype, device)
    weight = vector(257, dtype, device) if affine in ("both", "weight") else None
    bias = vector(257, dtype, device) if affine in ("both", "bias") else None
    want, _ = layer_norm_ref(x, weight, bias, EPS)
    assert_close(want, F.layer_norm(x, (257,), weight, bias, EPS))
    out = Output.like(x)
    layer_norm_triton(x, weight, bias, EPS, out=out.view, config={"rows": 2, "block": 512, "num_warps": 2})
    assert_close(out.checked(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 1000), (1, 4097)])
def test_ref_matches_fp64(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, r = random_rows(shape, dtype, device) + 3.0, random_rows(shape, dtype, device)
    weight, bias, b = (vector(shape[1], dtype, device) for _ in range(3))
    y, total = layer_norm_ref(x, weight, bias, EPS, residual=r, input_bias=b)
    assert_close(total, x.double() + b.double() + r.double())
    s = total.double()
    centred = s - s.mean(-1, keepdim=True)
    want = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double() + bias.double()
    assert_close(y, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_output_in_place(dtype: torch.dtype, device: torch.device) -> None:
    x, r = random_rows((5, 257), dtype, device), random_rows((5, 257), dtype, device)
    weight, bias, b = (vector(257, dtype, device) for _ in range(3))
    want, want_sum = layer_norm_ref(x, weight, bias, EPS, residual=r, input_bias=b)
    for norm in (layer_norm_triton, layer_norm_ref):
        y, total = x.clone(), r.clone()
        norm(y, weight, bias, EPS, residual=total, input_bias=b, out=y, residual_out=total)
        assert_close(y, want)
        assert_equal(total, want_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_fused_row_in_place(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = random_rows((5, 3, 80), dtype, device), vector(80, dtype, device), vector(80, dtype, device)
    want, _ = layer_norm_ref(x, weight, bias, EPS)
    out = Output.like(x)
    out.view.copy_(x)
    layer_norm_triton(out.view, weight, bias, EPS, out=out.view)
    assert_close(out.checked(), want)


def test_far_mean_keeps_its_variance(device: torch.device) -> None:
    """E[x^2] - E[x]^2 in fp32 would lose the variance of these rows."""
    x = torch.randn(3, 257, device=device) + 1000.0
    want = F.layer_norm(x.double(), (257,), eps=EPS)
    assert (layer_norm_triton(x, None, None, EPS)[0].double() - want).abs().max() < 1e-3
