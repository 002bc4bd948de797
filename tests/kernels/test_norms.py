"""RMS and layer norms: the kernels against torch, torch against Hugging Face's code and fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outpace.kernels.layer_norm import layer_norm_torch, layer_norm_triton
from outpace.kernels.rms_norm import rms_norm_torch, rms_norm_triton
from tests.kernels.buffers import Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal

SHAPES = [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (1, 4097), (2, 1024)]
EPS = 1e-5
GEMMA: dict[str, Any] = {"weight_offset": 1.0, "round_before_weight": False}


def llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """LlamaRMSNorm.forward."""
    h = x.to(torch.float32)
    variance = h.pow(2).mean(-1, keepdim=True)
    h = h * torch.rsqrt(variance + eps)
    return weight * h.to(x.dtype)


def gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """GemmaRMSNorm.forward."""
    output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def vector(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (1.0 + 0.3 * torch.randn(width, device=device)).to(dtype)


def check(norm: Any, x: torch.Tensor, want: torch.Tensor, *args: Any, roundings: int = 1, **options: Any) -> None:
    """A kernel into an output between guards; x is left alone."""
    kept, out = x.clone(), Output.like(x)
    assert norm(x, *args, EPS, out=out.view, **options) is out.view
    assert_close(out.checked(), want, roundings=roundings)
    assert_equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_match_torch(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = random_rows(shape, dtype, device), *(vector(shape[1], dtype, device) for _ in range(2))
    check(rms_norm_triton, x, rms_norm_torch(x, weight, EPS), weight, roundings=2)
    check(rms_norm_triton, x, rms_norm_torch(x, weight, EPS, **GEMMA), weight, **GEMMA)
    check(layer_norm_triton, x, layer_norm_torch(x, weight, bias, EPS), weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_is_hugging_face_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random_rows((5, 257), dtype, device), vector(257, dtype, device)
    assert_equal(rms_norm_torch(x, weight, EPS), llama(x, weight, EPS))
    assert_equal(rms_norm_torch(x, weight, EPS, **GEMMA), gemma(x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_rounds_where_each_family_does(dtype: torch.dtype, device: torch.device) -> None:
    """Only the order of the fp32 sum may differ, so all but a few elements are equal."""
    x, weight = random_rows((33, 257), dtype, device), vector(257, dtype, device)
    assert (rms_norm_triton(x, weight, EPS) == llama(x, weight, EPS)).float().mean() > 0.99
    assert (rms_norm_triton(x, weight, EPS, **GEMMA) == gemma(x, weight, EPS)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 1000), (1, 4097)])
def test_torch_matches_fp64(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = random_rows(shape, dtype, device) + 3.0, *(vector(shape[1], dtype, device) for _ in range(2))
    x64 = x.double()
    want = x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(rms_norm_torch(x, weight, EPS), want)
    centred = x64 - x64.mean(-1, keepdim=True)
    want = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double() + bias.double()
    assert_close(layer_norm_torch(x, weight, bias, EPS), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 64), (5, 2, 80), (3, 33, 1), (0, 2, 8)])
def test_heads_of_a_fused_row_in_place(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random_rows((tokens, heads, dim), dtype, device), vector(dim, dtype, device)
    calls: list[tuple[Any, ...]] = [
        (rms_norm_torch, rms_norm_triton, weight),
        (layer_norm_torch, layer_norm_triton, weight, None),
    ]
    for by_torch, norm, *args in calls:
        want, out = by_torch(x, *args, EPS), Output.like(x)
        out.view.copy_(x)
        assert norm(out.view, *args, EPS, out=out.view) is out.view
        assert_close(out.checked(), want, roundings=2)


def test_transposed_heads(device: torch.device) -> None:
    x = random_rows((3, 5, 16), torch.float32, device).transpose(0, 1)  # outer stride smaller than the inner
    weight = vector(16, torch.float32, device)
    assert_close(rms_norm_triton(x, weight, EPS), rms_norm_torch(x, weight, EPS))
    assert_close(layer_norm_triton(x, weight, weight, EPS), layer_norm_torch(x, weight, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_bias_are_optional_and_other_tiles(dtype: torch.dtype, device: torch.device) -> None:
    x, some = random_rows((5, 257), dtype, device), vector(257, dtype, device)
    config = {"rows": 2, "block": 512, "num_warps": 2}
    check(rms_norm_triton, x, rms_norm_torch(x, None, EPS), None)
    check(rms_norm_triton, x, rms_norm_torch(x, None, EPS), None, config=config)
    for weight, bias in ((some, some), (some, None), (None, some), (None, None)):
        want = layer_norm_torch(x, weight, bias, EPS)
        assert_close(want, F.layer_norm(x, (257,), weight, bias, EPS))
        check(layer_norm_triton, x, want, weight, bias, config=config)


def test_fp32_weight_on_16_bit_rows(device: torch.device) -> None:
    x, weight = random_rows((5, 33), torch.bfloat16, device), vector(33, torch.float32, device)
    for got, want in (
        (rms_norm_triton(x, weight, EPS), rms_norm_torch(x, weight, EPS)),
        (layer_norm_triton(x, weight, weight, EPS), layer_norm_torch(x, weight, weight, EPS)),
    ):
        assert got.dtype == want.dtype == torch.bfloat16
        assert_close(got, want, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_to_the_norm(dtype: torch.dtype, device: torch.device) -> None:
    """As Gemma's layers do it: the norm is rounded, then the sum."""
    x, add = random_rows((5, 70), dtype, device, gap=3), random_rows((5, 70), dtype, device, gap=5)
    weight, kept = vector(70, dtype, device), add.clone()
    want = rms_norm_torch(x, weight, EPS) + add
    assert_close(rms_norm_triton(x, weight, EPS, add=add), want)
    assert_equal(add, kept)
    assert_equal(rms_norm_torch(x, weight, EPS, add=add), want)
    assert_close(rms_norm_triton(x, weight, EPS, add=add, out=add), want)


def test_far_mean_keeps_its_variance(device: torch.device) -> None:
    """E[x^2] - E[x]^2 in fp32 would lose the variance of these rows."""
    x = torch.randn(3, 257, device=device) + 1000.0
    want = F.layer_norm(x.double(), (257,), eps=EPS)
    assert (layer_norm_triton(x, None, None, EPS).double() - want).abs().max() < 1e-3
