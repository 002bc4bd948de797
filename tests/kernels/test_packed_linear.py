"""Products with quantized weights, few rows and many, against the formula in fp64 and against the references."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.kernels.launch_options import MAX_ROWS
from outpace.kernels.packed import KINDS, Packed
from outpace.kernels.packed_gemv import packed_gemv_triton, takes_chunks
from outpace.kernels.packed_linear import (
    packed_choice,
    packed_linear_dequantized,
    packed_linear_invariant_torch,
    packed_linear_invariant_triton,
    packed_linear_triton,
)
from outpace.kernels.packed_matmul import PackedTiles, dequantize_triton, packed_matmul_triton
from tests.kernels.buffers import Output, random_rows
from tests.kernels.packing import random_packed
from tests.kernels.test_gemv import oracle, random_options
from tests.kernels.tolerances import DTYPES, ROUNDING, on_gpu

# (kind, group, rows that share a scale, with zeros)
FORMS = [
    ("int8", 10**6, 1, False),
    ("int8", 10**6, 1, True),
    ("int8", 32, 1, True),
    ("int8", 10**6, 10**6, False),
    ("int4", 64, 1, False),
    ("int4", 32, 1, True),
    ("int4", 10**6, 1, True),
    ("fp8", 10**6, 1, False),
    ("fp8", 128, 4, False),
]
FP32_TERM = 1e-6  # rounding of a term in a sum in fp32, relative to all terms
SHAPES = [(1, 3, 17), (1, 5, 1100), (3, 5, 257), (2, 3, 1088), (1, 3, 16)]


def form(weight: tuple[str, int, int, bool], shape: tuple[int, int], device: torch.device, **options: Any) -> Packed:
    """A random weight [N, K] of this form."""
    kind, group, block, zero = weight
    group, block = min(group, shape[1]), min(block, shape[0])
    return random_packed(kind, shape, group, block, zero=zero, device=device, **options)


def assert_near(got: Tensor, want: Tensor, roundings: float = 1.0, cancelled: Tensor | float = 0.0) -> None:
    """Equal up to roundings of the result, and `cancelled`, the rounding of larger terms that cancelled in it."""
    unit = ROUNDING[got.dtype]
    size = max(1.0, float(want.abs().max()))
    allowed = roundings * unit * (want.abs() + size / 4) + 2e-5 + cancelled
    error = (got.double() - want.double()).abs()
    assert bool((error <= allowed).all()), f"off by {error.max():.1e}: {(error / allowed).max():.2f} times the limit"


def check(product: Any, x: Tensor, weight: Packed, **options: Any) -> None:
    """A product against the exact result, and the reference, which rounds the weight and every step, beside it."""
    kept = x.clone()
    tiles = {name: options.pop(name) for name in ("config", "tiles") if name in options}
    want = oracle(x, weight.dequantized(torch.float32), **options)
    terms = sum_of_terms(x, weight, **options)
    out = Output.like(want.to(x.dtype))
    assert product(x, weight, out=out.view, **options, **tiles) is out.view
    assert_near(out.checked(), want, 1.5, terms * FP32_TERM)
    assert_near(packed_linear_dequantized(x, weight, **options), want, 8, terms * ROUNDING[x.dtype] / 8)
    assert torch.equal(x, kept)


def sum_of_terms(x: Tensor, weight: Packed, **options: Any) -> Tensor:
    """The product if no term cancelled another: that of magnitudes."""
    sizes: dict[str, Any] = {
        name: value.abs() if isinstance(value, Tensor) else value for name, value in options.items()
    }
    return oracle(x.abs(), weight.dequantized(torch.float32).abs(), **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", FORMS, ids=str)
def test_few_rows_of_odd_shapes(weight: tuple[str, int, int, bool], dtype: torch.dtype, device: torch.device) -> None:
    for gated, shape in itertools.product((False, True), SHAPES):
        rows, outputs, depth = shape
        x = random_rows((rows, depth), dtype, device)
        packed = form(weight, (outputs * (1 + gated), depth), device)
        check(packed_gemv_triton, x, packed, **random_options(shape, dtype, device, gated=gated))


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_scales_of_every_dtype(scale_dtype: torch.dtype, device: torch.device) -> None:
    x = random_rows((2, 200), torch.float32, device)
    for kind in KINDS:
        weight = random_packed(kind, (6, 200), 32, zero=True, scale_dtype=scale_dtype, device=device)
        check(packed_gemv_triton, x, weight)


@pytest.mark.parametrize("block_k", [16, 64, 256])
@pytest.mark.parametrize("group", [8, 24, 64, 96])
def test_tiles_and_groups_of_any_size(group: int, block_k: int, device: torch.device) -> None:
    for kind, depth, block_n in itertools.product(("int8", "int4"), (100,), (1, 4)):
        weight = random_packed(kind, (7, depth), group, zero=kind == "int8", device=device)
        config = {"block_n": block_n, "block_k": block_k, "num_warps": 1}
        x = random_rows((2, depth), torch.float32, device)
        check(
            packed_gemv_triton, x, weight, config=config, **random_options((2, 7, depth), x.dtype, device, gated=False)
        )


@pytest.mark.parametrize("rows", [1, 2, 5, MAX_ROWS])
def test_every_number_of_few_rows(rows: int, device: torch.device) -> None:
    x = random_rows((rows, 40), torch.float32, device)
    check(packed_gemv_triton, x, random_packed("int8", (3, 40), 40, device=device))


def test_pdl_changes_nothing(device: torch.device) -> None:
    x, weight = random_rows((1, 300), torch.bfloat16, device), random_packed("int4", (9, 300), 32, device=device)
    assert torch.equal(packed_gemv_triton(x, weight, pdl=True), packed_gemv_triton(x, weight, pdl=False))


def test_zero_scales_and_no_rows(device: torch.device) -> None:
    weight = random_packed("int4", (4, 24), 8, zero=True, device=device)
    weight.scale.zero_()
    assert not packed_gemv_triton(torch.randn(2, 24, device=device), weight).any()
    assert packed_gemv_triton(torch.empty(0, 24, device=device), weight).shape == (0, 4)
    assert packed_linear_dequantized(torch.empty(0, 24, device=device), weight).shape == (0, 4)


def test_out_may_be_add(device: torch.device) -> None:
    x, weight = random_rows((2, 33), torch.float32, device), random_packed("int8", (5, 33), 33, device=device)
    total = add = random_rows((2, 5), torch.float32, device)
    total = add.clone()
    assert packed_gemv_triton(x, weight, add=total, out=total) is total
    assert_near(total, oracle(x, weight.dequantized(torch.float32), add=add))


def test_what_few_rows_refuse(device: torch.device) -> None:
    x, weight = torch.zeros(1, 24, device=device), random_packed("int8", (4, 24), 6, device=device)
    assert not takes_chunks(weight)
    with pytest.raises(AssertionError, match="groups of 6 columns"):
        packed_gemv_triton(x, weight)
    weight = random_packed("int8", (3, 24), 24, device=device)
    for wrong, message in (
        ({"x": torch.zeros(17, 24, device=device)}, "17 rows"),
        ({"activation": "silu"}, "rows cannot be halved"),
        ({"add": x}, "neither"),
        ({"bias": x[0]}, "bias"),
    ):
        with pytest.raises(AssertionError, match=message):
            packed_gemv_triton(**{"x": x, "weight": weight, **wrong})  # type: ignore[arg-type]


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [*FORMS, ("int4", 6, 1, True), ("int4", 5, 1, False), ("int8", 3, 2, True)], ids=str)
def test_many_rows_of_odd_shapes(weight: tuple[str, int, int, bool], dtype: torch.dtype, device: torch.device) -> None:
    for shape, split in (((5, 17, 33), 1), ((19, 20, 300), 3)):
        rows, outputs, depth = shape
        x, packed = random_rows((rows, depth), dtype, device), form(weight, (outputs, depth), device)
        tiles = PackedTiles(16, 16, 32 if split > 1 else 64, num_stages=2, split=split)
        options = random_options(shape, dtype, device, gated=False, without=("norm_weight", "activation"))
        options = {name: options[name] for name in ("bias", "add")}
        check(packed_matmul_triton, x, packed, tiles=tiles, **options)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_by_a_kernel(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for group, zero in ((7, True), (32, False), (1500, True)):
        weight = random_packed(kind, (5, 1500 if group > 7 else 33), group, 2, zero=zero, device=device)
        assert torch.equal(dequantize_triton(weight, dtype), weight.dequantized(dtype))


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("rows", [1, 5, 30, 257])
@pytest.mark.parametrize("gated", [False, True])
def test_every_choice_has_every_option(rows: int, gated: bool, device: torch.device) -> None:
    shape = (rows, 4, 40)
    assert packed_choice(rows, form(FORMS[0], (4, 40), device)) == {1: "few", 257: "dequantize"}.get(rows, "tiles")
    x, weight = random_rows((rows, 40), torch.float32, device), form(FORMS[4], (4 * (1 + gated), 40), device)
    for product in (packed_linear_triton, packed_linear_invariant_torch, packed_linear_invariant_triton):
        check(product, x, weight, **random_options(shape, x.dtype, device, gated=gated))
    odd = random_packed("int4", (4 * (1 + gated), 40), 5, device=device)  # two halves of a byte with two scales
    check(packed_linear_triton, x, odd, **random_options(shape, x.dtype, device, gated=gated))


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("weight", [FORMS[1], FORMS[5]], ids=str)
@pytest.mark.parametrize("product", [packed_linear_invariant_torch, packed_linear_invariant_triton])
def test_rows_do_not_depend_on_the_others(
    product: Any, weight: tuple[str, int, int, bool], device: torch.device
) -> None:
    device = device if product is packed_linear_invariant_triton else torch.device("cpu")
    x, packed = torch.randn(70, 96, device=device), form(weight, (6, 96), device)
    norm = torch.rand(96, device=device)
    both = product(x, packed, norm_weight=norm, eps=1e-5, activation="silu")
    for row in (0, 3, 69):
        alone = product(x[row : row + 1], packed, norm_weight=norm, eps=1e-5, activation="silu")
        assert torch.equal(alone, both[row : row + 1])


@on_gpu
@pytest.mark.parametrize("weight", FORMS, ids=str)
def test_layers_of_an_8b(weight: tuple[str, int, int, bool], device: torch.device) -> None:
    """Real widths in bf16, with the tiles that are used, at every choice; and rows that do not depend on the batch."""
    kind, group, block, zero = weight
    for rows, (outputs, depth) in itertools.product(
        (1, 2, 4, 8, 16, 33, 64, 128, 256, 300), ((4096, 4096), (1030, 14336))
    ):
        packed = random_packed(
            kind, (outputs, depth), max(min(group, depth), 32), min(block, outputs), zero=zero, device=device
        )
        x = torch.randn(rows, depth, device=device).bfloat16()
        want = x.double() @ packed.dequantized(torch.float32).double().T
        assert_near(packed_linear_triton(x, packed), want, 4)
        got = packed_linear_invariant_triton(x, packed)
        assert_near(got, want, 4)
        assert torch.equal(packed_linear_invariant_triton(x[:1], packed), got[:1])
