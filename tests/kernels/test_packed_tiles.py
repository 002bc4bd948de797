"""Weights in groups as tiles on a CPU: the same weight, and products that bf16 explains."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.kernels.packed import Packed
from outpace.kernels.packed_linear import packed_linear_dequantized, packed_linear_tiles
from outpace.kernels.packed_tiles import MOST_ROWS, TiledWeight, rows_of_tiles, takes_tiles
from tests.kernels.packing import random_packed
from tests.kernels.test_gemv import oracle

WEIGHT = random_packed("int4", (64, 64), 32)
pytestmark = pytest.mark.skipif(not takes_tiles(WEIGHT), reason="torch has no such tiles on this CPU")
FORMS = [
    ("int4", 64, 64, 32, False),
    ("int4", 128, 96, 32, True),
    ("int4", 192, 256, 128, True),
    ("int4", 64, 320, 64, False),
    ("int8", 64, 64, 32, False),
    ("int8", 128, 192, 64, True),
]
Form = tuple[str, int, int, int, bool]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
def test_tiles_hold_the_same_weight(form: Form, scale_dtype: torch.dtype) -> None:
    kind, outputs, depth, group, zero = form
    weight = random_packed(kind, (outputs, depth), group, zero=zero, scale_dtype=scale_dtype)
    assert takes_tiles(weight)
    tiles = TiledWeight.of(weight)
    assert torch.equal(tiles.dequantized(torch.float32), weight.dequantized(torch.float32))
    assert tiles.values.nbytes == weight.values.nbytes
    rows = torch.tensor([0, 1, 31, 32, 63, outputs - 1, 32])
    assert torch.equal(rows_of_tiles(tiles.values, rows, depth), weight.values[rows])


def near(got: Tensor, want: Tensor, most: float) -> None:
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= most, float(error)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(form: Form, dtype: torch.dtype) -> None:
    kind, outputs, depth, group, zero = form
    weight = random_packed(kind, (outputs, depth), group, zero=zero)
    tiles, bias = TiledWeight.of(weight), torch.randn(outputs).to(dtype)
    for rows in (1, 3, MOST_ROWS[tiles.planes], MOST_ROWS[tiles.planes] + 1):
        x, add = torch.randn(rows, depth).to(dtype), torch.randn(rows, outputs).to(dtype)
        for terms in ((None, None), (bias, None), (bias, add)):
            want = oracle(x, weight.dequantized(torch.float32), bias=terms[0], add=terms[1])
            got = packed_linear_tiles(x, tiles, bias=terms[0], add=terms[1])
            assert (got.dtype, got.shape) == (dtype, want.shape)
            near(got, want, 0.005)
        out = add.clone()
        assert packed_linear_tiles(x, tiles, add=out, out=out) is out
        near(out, packed_linear_dequantized(x.float(), weight, add=add.float()), 0.005)


def test_norm_and_gated_activation() -> None:
    weight, x, norm = random_packed("int4", (128, 64), 64), torch.randn(2, 64), torch.rand(64) + 0.5
    options: dict[str, Any] = {"norm_weight": norm, "eps": 1e-5, "activation": "silu"}
    want = packed_linear_dequantized(x, weight, **options)
    near(packed_linear_tiles(x, TiledWeight.of(weight), **options), want, 0.01)


def test_what_stays_as_it_is() -> None:
    weights: list[Packed] = [
        random_packed("int4", (60, 64), 32),
        random_packed("int4", (64, 64), 16),
        random_packed("int4", (64, 48), 32),
        random_packed("int4", (64, 64), 64, 4),
        random_packed("int8", (64, 64), 64),
        random_packed("fp8", (64, 64), 32),
        random_packed("int4", (64, 64), 32, experts=2),
    ]
    assert not any(takes_tiles(weight) for weight in weights)
    x = torch.randn(2, 64)
    assert torch.equal(packed_linear_tiles(x, weights[0]), packed_linear_dequantized(x, weights[0]))
