import pytest
import torch

from outpace.kernels.softmax import softmax_ref, softmax_triton
from tests.kernels.buffers import Output, poisoned, random_rows
from tests.kernels.tolerances import DTYPES, assert_close

# numpy's words on what a GPU does in silence: a row of length 0 divides by zero, in lanes that are not kept.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")

SHAPES = [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (1, 4097)]
SMALL = {"block": 128, "num_warps": 2}  # so that short rows take several passes too


def in_fp64(x: torch.Tensor, scale: float, lengths: torch.Tensor | None) -> torch.Tensor:
    """One row at a time."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row in range(x.shape[0]):
        length = x.shape[1] if lengths is None else int(lengths[row])
        e = (scale * x[row, :length].double()).exp()
        y[row, :length] = e / e.sum()
    return y


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_ref_match_fp64(
    shape: tuple[int, int], dtype: torch.dtype, masked: bool, device: torch.device
) -> None:
    rows, width = shape
    values = (3 * torch.randn(shape, device=device)).to(dtype)
    lengths = torch.randint(0, width + 1, (rows,), device=device, dtype=torch.int32) if masked else None
    if lengths is not None:
        lengths[:1] = 0
        values.masked_fill_(torch.arange(width, device=device) >= lengths[:, None], float("nan"))
    x = poisoned(values, gap=5)
    want = in_fp64(x, 0.7, lengths)
    assert_close(softmax_ref(x, scale=0.7, lengths=lengths), want)
    for config in (None, SMALL):
        out = Output.like(x)
        assert softmax_triton(x, scale=0.7, lengths=lengths, out=out.view, config=config) is out.view
        written = out.checked()
        assert_close(written, want)
        assert (written[want == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_banned_columns_and_far_values(dtype: torch.dtype, device: torch.device) -> None:
    x = random_rows((3, 300), dtype, device)
    x[0, :200] = float("-inf")  # the first pass of this row sees nothing else
    x[1, ::2] = float("-inf")
    x[2] += 500.0
    for config in (None, SMALL):
        assert_close(softmax_triton(x, config=config), torch.softmax(x.double(), dim=1))
    assert_close(softmax_ref(x), torch.softmax(x.double(), dim=1))


@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_scale_of_any_sign(scale: float, device: torch.device) -> None:
    x, lengths = random_rows((3, 300), torch.float32, device), torch.tensor([1, 200, 300], device=device)
    for config in (None, SMALL):
        assert_close(softmax_triton(x, scale=scale, lengths=lengths, config=config), in_fp64(x, scale, lengths))
    assert_close(softmax_ref(x, scale=scale, lengths=lengths), in_fp64(x, scale, lengths))


def test_a_row_without_a_choice_is_nan_as_in_torch(device: torch.device) -> None:
    x = torch.full((1, 300), float("-inf"), device=device)
    assert softmax_triton(x, config=SMALL).isnan().all()
    assert softmax_ref(x).isnan().all()


def test_fp32_output_of_16_bit_rows_and_in_place(device: torch.device) -> None:
    x = random_rows((5, 257), torch.bfloat16, device)
    out = torch.empty(5, 257, device=device)
    want = torch.softmax(x.double(), dim=1)
    assert_close(softmax_triton(x, out=out), want)
    assert_close(softmax_triton(x, out=x, config=SMALL), want)
