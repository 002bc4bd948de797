import pytest
import torch

from outpace.kernels.gather import gather_rows_ref, gather_rows_triton
from tests.kernels.buffers import Output, poisoned
from tests.kernels.tolerances import DTYPES, assert_equal


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (2, 4097)])
def test_kernel_matches_ref(
    count: int, width: int, dtype: torch.dtype, index: torch.dtype, device: torch.device
) -> None:
    source = torch.randn(7, width, device=device).to(dtype)
    rows = torch.randint(0, 7, (count,), device=device, dtype=index)
    unused = torch.ones(7, dtype=torch.bool, device=device)
    unused[rows.long()] = False
    x = poisoned(source.masked_fill(unused[:, None], float("nan")), gap=5)
    out = Output.like(source[:0].new_empty(count, width))
    assert gather_rows_triton(x, rows, out=out.view) is out.view
    want = torch.stack([source[i] for i in rows.tolist()]) if count else source[:0]
    assert_equal(out.checked(), want)
    assert_equal(gather_rows_triton(x, rows, config={"block": 64}), want)
    assert_equal(gather_rows_ref(x, rows), want)
    assert_equal(gather_rows_ref(x, rows, out=out.view), want)
