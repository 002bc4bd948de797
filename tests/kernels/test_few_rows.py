import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.kernels.activation import ACTIVATIONS
from outpace.kernels.few_rows import (
    MAX_BLOCKS,
    FewRowsTiles,
    Scratch,
    few_rows_tiles,
    few_rows_triton,
    folds_norm,
    linear_few_rows,
    takes_few_rows,
)
from outpace.kernels.gemv import fused_linear_torch, gemv_triton
from outpace.kernels.launch_options import MAX_ROWS
from tests.kernels.buffers import Output, random_rows
from tests.kernels.test_gemv import OPTIONS, guarded, oracle, random_options, random_weight
from tests.kernels.tolerances import DTYPES, ROUNDING, assert_close, assert_equal

# (M, N, K): no multiples of the tiles, fewer columns than a tile, several tiles, one output, one column
SHAPES = [(2, 1, 1), (2, 5, 17), (3, 70, 257), (8, 33, 300), (16, 65, 600)]
PARTS = FewRowsTiles(32, 64, num_stages=2, split=3)


def check(x: Tensor, weight: Tensor, tiles: FewRowsTiles | None = None, **options: Any) -> None:
    """Against the exact result: rows times the norm's weight are rounded once, and so is the result."""
    kept, counts = x.clone(), torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=x.device)
    want = oracle(x, weight, **options)
    out = Output.like(fused_linear_torch(x, weight, **options))
    assert few_rows_triton(x, weight, out=out.view, counts=counts, tiles=tiles, **options) is out.view
    got = out.checked()
    if options.get("norm_weight") is None or x.dtype == torch.float32:
        assert_close(got, want)
    size = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=4 * ROUNDING[x.dtype], atol=6 * size * ROUNDING[x.dtype])
    assert_equal(x, kept)
    assert not counts.any()  # the next launch finds zeros


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bare_and_with_everything(
    shape: tuple[int, int, int], dtype: torch.dtype, gated: bool, device: torch.device
) -> None:
    rows, outputs, depth = shape
    x, weight = random_rows((rows, depth), dtype, device), random_weight(outputs * (1 + gated), depth, dtype, device)
    check(x, weight, activation="silu" if gated else None)
    check(x, weight, **random_options(shape, dtype, device, gated=gated))
    check(x, weight, PARTS, **random_options(shape, dtype, device, gated=gated))


@pytest.mark.parametrize("without", list(itertools.product(*(("", name) for name in OPTIONS))), ids="-".join)
@pytest.mark.parametrize("tiles", [FewRowsTiles(16, 32, num_stages=1), PARTS], ids=["whole", "parts"])
def test_every_combination_of_options(without: tuple[str, ...], tiles: FewRowsTiles, device: torch.device) -> None:
    shape, gated = (3, 40, 270), "activation" not in without
    x, weight = (
        random_rows((3, 270), torch.float32, device),
        random_weight(40 * (1 + gated), 270, torch.float32, device),
    )
    check(x, weight, tiles, **random_options(shape, torch.float32, device, gated=gated, without=without))


@pytest.mark.parametrize("rows", range(2, MAX_ROWS + 1))
def test_every_number_of_rows(rows: int, device: torch.device) -> None:
    x, weight = random_rows((rows, 200), torch.float32, device), random_weight(70, 200, torch.float32, device)
    check(x, weight, **random_options((rows, 70, 200), torch.float32, device, gated=False))


@pytest.mark.parametrize("kind", sorted(set(ACTIVATIONS.values())))
def test_every_activation_gated_and_plain(kind: str, device: torch.device) -> None:
    x, weight = random_rows((2, 70), torch.float32, device), random_weight(10, 70, torch.float32, device)
    check(x, weight, activation=kind)
    check(x, weight, activation=kind, gated=False, bias=guarded(torch.randn(10, device=device)))


def test_the_sum_may_take_the_place_of_what_is_added(device: torch.device) -> None:
    x, weight = random_rows((4, 96), torch.float32, device), random_weight(40, 96, torch.float32, device)
    add = torch.randn(4, 40, device=device)
    want = oracle(x, weight, add=add)
    assert few_rows_triton(x, weight, add=add, out=add) is add
    assert_close(add, want)


def test_no_rows_of_padding_are_read(device: torch.device) -> None:
    """A tile has 16 rows; behind the real ones lies NaN."""
    base = torch.full((20, 64), float("nan"), device=device)
    base[:5] = torch.randn(5, 64, device=device)
    weight = random_weight(8, 64, torch.float32, device)
    assert_close(few_rows_triton(base[:5], weight), oracle(base[:5], weight))


def test_without_counters_no_depth_is_cut(device: torch.device) -> None:
    x, weight = random_rows((4, 512), torch.float32, device), random_weight(40, 512, torch.float32, device)
    assert_close(few_rows_triton(x, weight, tiles=PARTS), oracle(x, weight))


def test_one_row_goes_to_gemv(device: torch.device) -> None:
    scratch = Scratch()
    for rows in (1, 2):
        x, weight = random_rows((rows, 96), torch.float32, device), random_weight(40, 96, torch.float32, device)
        got = linear_few_rows(x, weight, scratch=scratch)
        assert_close(got, oracle(x, weight))
        if rows == 1:
            assert_equal(got, gemv_triton(x, weight))
    assert scratch.counts(device) is scratch.counts(device)


def test_who_takes_which_rows() -> None:
    assert takes_few_rows(1, torch.float32)
    assert not takes_few_rows(2, torch.float32)  # no tensor cores
    assert takes_few_rows(2, torch.float16)
    assert takes_few_rows(MAX_ROWS, torch.bfloat16)
    assert not takes_few_rows(MAX_ROWS + 1, torch.bfloat16)
    assert not takes_few_rows(0, torch.bfloat16)
    assert folds_norm(1, torch.float16, centered=True)
    assert folds_norm(2, torch.bfloat16, centered=False)
    assert not folds_norm(2, torch.bfloat16, centered=True)
    assert not folds_norm(2, torch.float16, centered=False)  # their product may be more than fp16 holds


def test_tiles_fit_every_shape() -> None:
    sizes = (1, 40, 2048, 4096, 12288, 28672, 256000)
    for outputs, depth, gated, normed in itertools.product(sizes, sizes[:-1], (False, True), (False, True)):
        tiles = few_rows_tiles(outputs, depth, gated=gated, normed=normed)
        blocks = -(-outputs // tiles.block_n)
        assert 1 <= tiles.split <= -(-depth // tiles.block_k)
        assert tiles.split == 1 or blocks <= MAX_BLOCKS
        held = tiles.num_stages * tiles.block_k * (tiles.block_n * (1 + gated) + 16) * 2
        assert held <= 200 << 10  # bytes of shared memory
