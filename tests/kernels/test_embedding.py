from typing import Any

import pytest
import torch

from outpace.kernels.embedding import embed_torch, embed_triton
from tests.kernels.buffers import Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal

SHAPES = [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (1, 4097)]


@pytest.mark.parametrize(
    ("learned", "offset", "scale"), [(False, 0, 1.0), (True, 2, 1.0), (False, 0, 55.4), (True, 0, 0.3)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_ref_match_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, learned: bool, offset: int, scale: float, device: torch.device
) -> None:
    tokens, width = shape
    table, places = random_rows((11, width), dtype, device), random_rows((9, width), dtype, device, gap=3)
    ids = torch.randint(0, 11, (tokens,), device=device)
    positions = torch.randint(0, 9 - offset, (tokens,), device=device, dtype=torch.int32)
    options: dict[str, Any] = (
        {"positions": positions, "position_table": places, "position_offset": offset} if learned else {}
    )
    want = table[ids]
    if scale != 1.0:
        want = want * torch.tensor(scale, dtype=dtype, device=device)  # as Gemma's scaled embedding
    if learned:
        want = want + places[positions.long() + offset]
    assert_equal(embed_torch(ids, table, scale=scale, **options), want)
    out = Output.like(want)
    assert embed_triton(ids, table, scale=scale, out=out.view, **options) is out.view
    same = assert_close if learned and scale != 1.0 else assert_equal  # a GPU multiplies and adds in one rounding
    same(out.checked(), want)


def test_int32_ids_and_other_tiles(device: torch.device) -> None:
    table = random_rows((11, 100), torch.float16, device)
    ids = torch.tensor([10, 0, 3], device=device, dtype=torch.int32)
    assert_equal(embed_triton(ids, table, config={"block": 32, "num_warps": 1}), table[ids.long()])
    assert_equal(embed_torch(ids, table), table[ids.long()])


def test_a_position_table_needs_positions(device: torch.device) -> None:
    table, ids = torch.zeros(3, 4, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for embed in (embed_torch, embed_triton):
        with pytest.raises(AssertionError, match="needs positions"):
            embed(ids, table, position_table=table)
