import pytest
import torch

from outpace.kernels.rms_norm import rms_norm_ref, rms_norm_triton
from tests.kernels.buffers import Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal

SHAPES = [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (1, 4097), (2, 1024)]
EPS = 1e-5


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


def weight_for(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (1.0 + 0.3 * torch.randn(width, device=device)).to(dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_ref(
    shape: tuple[int, int], dtype: torch.dtype, round_first: bool, residual: bool, device: torch.device
) -> None:
    x, weight = random_rows(shape, dtype, device), weight_for(shape[1], dtype, device)
    kept = x.clone()
    r = random_rows(shape, dtype, device, gap=3) if residual else None
    offset = 0.0 if round_first else 1.0
    want, want_sum = rms_norm_ref(x, weight, EPS, residual=r, round_before_weight=round_first, weight_offset=offset)
    out, total = Output.like(x), Output.like(x, gap=7)
    got, got_sum = rms_norm_triton(
        x,
        weight,
        EPS,
        residual=r,
        round_before_weight=round_first,
        weight_offset=offset,
        out=out.view,
        residual_out=total.view if residual else None,
    )
    assert got is out.view
    assert_close(out.checked(), want, roundings=2 if round_first else 1)
    assert got_sum is (total.view if residual else x)
    assert_equal(total.checked() if residual else got_sum, want_sum)
    assert_equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ref_is_hugging_face_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    x, r = random_rows((5, 257), dtype, device), random_rows((5, 257), dtype, device)
    weight = weight_for(257, dtype, device)
    assert_equal(rms_norm_ref(x, weight, EPS)[0], llama(x, weight, EPS))
    y, total = rms_norm_ref(x, weight, EPS, residual=r)
    assert_equal(total, x + r)
    assert_equal(y, llama(x + r, weight, EPS))
    got, _ = rms_norm_ref(x, weight, EPS, weight_offset=1.0, round_before_weight=False)
    assert_equal(got, gemma(x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_rounds_where_each_family_does(dtype: torch.dtype, device: torch.device) -> None:
    """Only a difference in the order of the fp32 sum may show, so all but a few elements are equal."""
    x, weight = random_rows((33, 257), dtype, device), weight_for(257, dtype, device)
    r = random_rows((33, 257), dtype, device)
    as_llama, _ = rms_norm_triton(x, weight, EPS, residual=r)
    as_gemma, _ = rms_norm_triton(x, weight, EPS, weight_offset=1.0, round_before_weight=False)
    assert (as_llama == llama(x + r, weight, EPS)).float().mean() > 0.99
    assert (as_gemma == gemma(x, weight, EPS)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 1000), (1, 4097)])
def test_ref_matches_fp64(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random_rows(shape, dtype, device), weight_for(shape[1], dtype, device)
    x64 = x.double()
    want = x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(rms_norm_ref(x, weight, EPS)[0], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 64), (5, 2, 80), (3, 33, 1), (0, 2, 8)])
def test_heads_of_a_fused_row_in_place(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random_rows((tokens, heads, dim), dtype, device), weight_for(dim, dtype, device)
    want, _ = rms_norm_ref(x, weight, EPS)
    out = Output.like(x)
    out.view.copy_(x)
    got, _ = rms_norm_triton(out.view, weight, EPS, out=out.view)
    assert got is out.view
    assert_close(out.checked(), want, roundings=2)


def test_transposed_heads(device: torch.device) -> None:
    x = random_rows((3, 5, 16), torch.float32, device).transpose(0, 1)  # outer stride smaller than the inner
    weight = weight_for(16, torch.float32, device)
    assert_close(rms_norm_triton(x, weight, EPS)[0], rms_norm_ref(x, weight, EPS)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_and_output_in_place(dtype: torch.dtype, device: torch.device) -> None:
    weight = weight_for(257, dtype, device)
    x, r = Output.like(torch.empty(5, 257, dtype=dtype, device=device)), random_rows((5, 257), dtype, device)
    x.view.copy_(torch.randn(5, 257))
    want, want_sum = rms_norm_ref(x.view, weight, EPS, residual=r)
    for norm in (rms_norm_triton, rms_norm_ref):
        y, total = x.view.clone(), r.clone()
        norm(y, weight, EPS, residual=total, out=y, residual_out=total)
        assert_close(y, want, roundings=2)
        assert_equal(total, want_sum)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_weight_and_other_tiles(dtype: torch.dtype, device: torch.device) -> None:
    x = random_rows((5, 33), dtype, device)
    want, _ = rms_norm_ref(x, None, EPS)
    assert_close(rms_norm_triton(x, None, EPS)[0], want)
    out = Output.like(x)
    rms_norm_triton(x, None, EPS, out=out.view, config={"rows": 2, "block": 128, "num_warps": 2})
    assert_close(out.checked(), want)


def test_fp32_weight_on_16_bit_rows(device: torch.device) -> None:
    x, weight = random_rows((5, 33), torch.bfloat16, device), weight_for(33, torch.float32, device)
    got, want = rms_norm_triton(x, weight, EPS)[0], rms_norm_ref(x, weight, EPS)[0]
    assert got.dtype == want.dtype == torch.bfloat16
    assert_close(got, want, roundings=2)
