import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.kernels import matmul
from outpace.kernels.matmul import (
    CHUNK_STEP,
    MAX_CHUNKS,
    MatmulTiles,
    chunk_depth,
    matmul_invariant_torch,
    matmul_invariant_triton,
    matmul_tiles,
    matmul_torch,
)
from tests.kernels.buffers import Output, poisoned, random_rows
from tests.kernels.test_gemv import guarded, oracle, random_weight
from tests.kernels.tolerances import DTYPES, ROUNDING, assert_close, assert_equal, on_gpu

GPU = torch.cuda.is_available()
HALF = torch.bfloat16
Product = Callable[..., Tensor]
ROWS = (1, 2, 7, 16, 63, 64, 65, 130)

# (M, N, K): one of each, no multiples of the tiles, several tiles, several chunks and the last one short
SHAPES = [(1, 1, 1), (3, 5, 17), (2, 7, 128), (65, 3, 130), (7, 66, 70), (7, 3, 300), (66, 5, 256), (2, 3, 600)]
TILES = [
    MatmulTiles(64, 16),
    MatmulTiles(64, 32, split=True),
    MatmulTiles(128, 16, 32, num_warps=8, split=True),
    MatmulTiles(128, 32, 128, num_warps=8, num_stages=3, group_m=1),
    MatmulTiles(64, 64, 16, num_stages=2),
]
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
pytestmark = pytest.mark.usefixtures("left_to_right")


@pytest.fixture(autouse=True)
def _short_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is run, 256 columns already have two chunks."""
    if "device" in request.fixturenames:
        monkeypatch.setattr(matmul, "MIN_CHUNK", 128)


def random_operands(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x, weight, and bias and add, all among NaNs."""
    rows, outputs, depth = shape
    bias = guarded(torch.randn(outputs, device=device).to(dtype))
    add = random_rows((rows, outputs), dtype, device, gap=3)
    x, weight = random_rows((rows, depth), dtype, device), random_weight(outputs, depth, dtype, device)
    return x, weight, {"bias": bias, "add": add}


def check(product: Product, x: Tensor, weight: Tensor, roundings: int = 1, **options: Any) -> Tensor:
    """A product against the exact result; nothing else is written and x is left alone."""
    kept, want = x.clone(), oracle(x, weight, **options)
    out = Output.like(want.to(x.dtype))
    assert product(x, weight, out=out.view, **options) is out.view
    got = out.checked()
    assert_close(got, want, roundings=roundings, magnitude=(roundings - 1) * 4.0)
    assert_equal(product(x, weight, **options), got)
    assert_equal(x, kept)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_combination_of_options(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight, both = random_operands(shape, dtype, device)
    for names in ((), ("bias",), ("add",), ("bias", "add")) if shape[0] < 10 else ((), ("bias", "add")):
        options = {name: both[name] for name in names}
        check(matmul_invariant_triton, x, weight, **options)
        check(matmul_invariant_torch, x, weight, roundings=2, **options)
        check(matmul_torch, x, weight, roundings=3, **options)


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("shape", [(65, 35, 300), (7, 66, 70), (130, 5, 100)])
def test_tiles_change_no_bit(shape: tuple[int, int, int], tiles: MatmulTiles, device: torch.device) -> None:
    for dtype in (torch.float32, HALF):
        x, weight, options = random_operands(shape, dtype, device)
        want = matmul_invariant_triton(x, weight, **options)
        assert_equal(check(lambda *a, **k: matmul_invariant_triton(*a, **k, tiles=tiles), x, weight, **options), want)


def assert_rows_alike(product: Product, x: Tensor, weight: Tensor, cuts: list[int], **options: Any) -> None:
    """The rows of one product are those of the products of its pieces, bit for bit."""
    add = options.pop("add", None)
    whole = product(x, weight, add=add, **options)
    for start, stop in itertools.pairwise([0, *cuts, len(x)]):
        piece = product(x[start:stop], weight, add=None if add is None else add[start:stop], **options)
        assert torch.equal(piece, whole[start:stop]), (start, stop)


@pytest.mark.parametrize("product", [matmul_invariant_triton, matmul_invariant_torch])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("outputs", "depth"), [(5, 600), (33, 130), (7, 257)])
def test_a_row_is_the_same_in_every_product(
    outputs: int, depth: int, dtype: torch.dtype, product: Product, device: torch.device
) -> None:
    x, weight, options = random_operands((130, outputs, depth), dtype, device)
    whole = product(x, weight, **options)
    bias, add = options["bias"], options["add"]
    for rows, start in [(1, 0), (1, 129), *((rows, (130 - rows) // 2) for rows in ROWS[1:])]:
        part = slice(start, start + rows)
        assert torch.equal(product(x[part], weight, bias, add=add[part]), whole[part]), part
    turned = torch.randperm(130, device=device)
    assert torch.equal(product(x[turned], weight, bias, add=add[turned]), whole[turned])


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 140),
    cuts=st.sets(st.integers(1, 139), max_size=3),
    outputs=st.integers(1, 70),
    depth=st.integers(1, 400),
    half=st.booleans(),
    of_kernel=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_split_anywhere(
    rows: int, cuts: set[int], outputs: int, depth: int, half: bool, of_kernel: bool, seed: int, device: torch.device
) -> None:
    torch.manual_seed(seed)
    x, weight, options = random_operands((rows, outputs, depth), HALF if half else torch.float32, device)
    product = matmul_invariant_triton if of_kernel else matmul_invariant_torch
    assert_rows_alike(product, x, weight, sorted(cut for cut in cuts if cut < rows), **options)


@pytest.mark.skipif(GPU, reason="about torch on a CPU")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
def test_the_reference_with_any_number_of_threads(threads: int, dtype: torch.dtype) -> None:
    """Shapes of which F.linear adds rows in an order that depends on their place, and ones that threads share."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs, depth in ((2, 11), (4, 166), (8, 293), (11, 1678), (256, 512), (1000, 129)):
            x, weight, options = random_operands((70, outputs, depth), dtype, torch.device("cpu"))
            assert_rows_alike(matmul_invariant_torch, x, weight, [1, 4, 36, 69], **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("product", [matmul_invariant_triton, matmul_invariant_torch])
def test_other_rows_do_no_harm(product: Product, device: torch.device) -> None:
    x, weight, _ = random_operands((70, 5, 300), torch.float32, device)
    spoiled = x.clone()
    spoiled[::2], spoiled[1::4] = float("nan"), 1e30
    assert_equal(product(spoiled, weight)[3::4], product(x, weight)[3::4])


@pytest.mark.parametrize("rows", [1, 130])
def test_the_order_shows_in_the_bits(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other chunks give other bits, so the tests above would notice."""
    x, weight, _ = random_operands((rows, 40, 500), torch.float32, device)
    found = matmul_invariant_triton(x, weight)
    monkeypatch.setattr(matmul, "chunk_depth", lambda outputs, depth: 128)
    assert not torch.equal(matmul_invariant_triton(x, weight), found)


def test_weight_rows_apart_and_one_row_of_any_stride(device: torch.device) -> None:
    weight = poisoned(torch.randn(5, 33, device=device), gap=7)
    x = torch.randn(3, 33, device=device)[1:2]
    want = check(matmul_invariant_triton, x, weight)
    assert_equal(matmul_invariant_triton(x.as_strided((1, 33), (7, 1), x.storage_offset()), weight), want)


@pytest.mark.parametrize("product", [matmul_invariant_triton, matmul_invariant_torch, matmul_torch])
@pytest.mark.parametrize("biased", [False, True])
def test_out_may_be_add(product: Product, biased: bool, device: torch.device) -> None:
    x, weight, both = random_operands((2, 5, 300), torch.float32, device)
    bias, add = both["bias"] if biased else None, both["add"]
    total = add.clone()
    assert product(x, weight, bias, add=total, out=total) is total
    assert_equal(total, product(x, weight, bias, add=add))


@pytest.mark.parametrize("product", [matmul_invariant_triton, matmul_invariant_torch, matmul_torch])
def test_nothing_to_do(product: Product, device: torch.device) -> None:
    assert product(torch.empty(0, 8, device=device), torch.empty(4, 8, device=device)).shape == (0, 4)
    assert product(torch.empty(2, 8, device=device), torch.empty(0, 8, device=device)).shape == (2, 0)


def test_what_it_refuses(device: torch.device) -> None:
    x, weight = torch.zeros(1, 8, device=device), torch.zeros(4, 8, device=device)
    with pytest.raises(AssertionError, match="contiguous"):
        matmul_invariant_triton(x, torch.zeros(8, 4, device=device).T)
    with pytest.raises(AssertionError, match="another matrix instruction"):
        matmul_invariant_triton(x.half(), weight.half(), tiles=MatmulTiles(32, 32))
    with pytest.raises(AssertionError, match="block_k=256"):
        matmul_invariant_triton(x, weight, tiles=MatmulTiles(64, 32, 256))
    wrongs: list[dict[str, Any]] = [{"bias": weight[0]}, {"add": x}, {"out": x}, {"add": x[:, :4].half()}]
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            matmul_invariant_triton(x, weight, **wrong)
    with pytest.raises(AssertionError):
        matmul_invariant_triton(x.half(), weight)


@given(outputs=st.integers(1, 200_000), depth=st.integers(1, 40_000), rows=st.integers(1, 20_000))
def test_chunks_and_tiles_are_sane(outputs: int, depth: int, rows: int) -> None:
    chunk = chunk_depth(outputs, depth)
    assert chunk % CHUNK_STEP == 0
    assert (-(-depth // chunk) - 1) * chunk < depth <= MAX_CHUNKS * chunk, "no chunk is empty, and they hold it all"
    for dtype in DTYPES:
        tiles = matmul_tiles(rows, outputs, depth, dtype)
        assert CHUNK_STEP % tiles.block_k == 0
        assert dtype == torch.float32 or tiles.block_m >= 64
        assert tiles.block_k == matmul_tiles(1, outputs, depth, dtype).block_k
        assert not tiles.split or chunk < depth


@pytest.mark.parametrize(("outputs", "depth"), [*LLAMA_8B, (2048, 2048), (2048, 8192), (4096, 1024)])
def test_few_rows_fill_the_gpu(outputs: int, depth: int) -> None:
    tiles = matmul_tiles(1, outputs, depth, HALF)
    chunks = -(-depth // chunk_depth(outputs, depth)) if tiles.split else 1
    assert chunks * outputs // tiles.block_n >= 132


@on_gpu
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "depth"), LLAMA_8B)
def test_rows_of_a_large_model_are_alike(outputs: int, depth: int, dtype: torch.dtype, device: torch.device) -> None:
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    x, bias, add = torch.randn(2048, depth, **kind), torch.randn(outputs, **kind), torch.randn(2048, outputs, **kind)
    weight = torch.randn(outputs, depth, **kind).div_(depth**0.5)
    whole = matmul_invariant_triton(x, weight, bias, add=add)
    for rows, start in itertools.product((1, 8, 64, 256), (0, 5, 1700)):
        part = slice(start, start + rows)
        assert torch.equal(matmul_invariant_triton(x[part], weight, bias, add=add[part]), whole[part]), (rows, start)
    want = x[:64].double() @ weight[:512].double().T + bias[:512].double() + add[:64, :512].double()
    unit = ROUNDING[dtype]
    torch.testing.assert_close(whole[:64, :512].double(), want, rtol=unit, atol=max(2e-5, unit / 64))


@on_gpu
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_tiles_of_a_large_model_change_no_bit(dtype: torch.dtype, block_m: int, device: torch.device) -> None:
    x = torch.randn(300, 4096, device=device).to(dtype)
    weight = (torch.randn(6144, 4096, device=device) / 64).to(dtype)
    want = matmul_invariant_triton(x, weight)
    base = MatmulTiles(block_m, 128, num_warps=block_m // 16, num_stages=3)
    for block_n, block_k, split in itertools.product((16, 64, 128), (64, 128), (False, True)):
        tiles = replace(base, block_n=block_n, block_k=block_k, split=split)
        assert torch.equal(matmul_invariant_triton(x, weight, tiles=tiles), want), tiles


def test_many_rows_of_a_wide_weight_in_pieces() -> None:
    x, weight = torch.randn(40, 8), torch.randn(16, 8)
    torch.testing.assert_close(matmul._in_pieces(x, weight), x @ weight.t())
    long = torch.randn(2 * matmul.PIECE + 3, 8)
    torch.testing.assert_close(matmul._in_pieces(long, weight), long @ weight.t())
