"""The linear that looks its products up in a table."""

import copy
import logging
import pickle

import pytest
import torch
from torch import Tensor

from outpace.kernels.cublaslt import CublasLtError, Plan, Product
from outpace.kernels.library import TunedLinear
from outpace.kernels.matmul import matmul_torch
from tests.kernels.fake_cublaslt import aligned


def marking(mark: float) -> Plan:
    """A plan that can be told from torch."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, out: Tensor) -> None:
        out.fill_(mark)

    return run


def failing(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, out: Tensor) -> None:
    raise CublasLtError("cublasLtMatmul returned 15")


def is_torch(made: Tensor, x: Tensor, weight: Tensor, **rest: Tensor) -> bool:
    return torch.equal(made, matmul_torch(x, weight, **rest))


def test_what_is_not_in_the_table_is_torchs() -> None:
    linear, x, weight = TunedLinear(), aligned(20, 32), aligned(16, 32)
    assert is_torch(linear(x, weight), x, weight)
    linear.use({Product(20, 16, 32, torch.bfloat16, False, False): marking(7)})
    assert linear(x, weight).unique().tolist() == [7]
    others = (x[:19].clone(), weight), (x.half(), weight.half()), (x, aligned(24, 32))
    for given in others:
        assert is_torch(linear(*given), *given)
    bias, add = aligned(16), aligned(20, 16)
    assert is_torch(linear(x, weight, bias), x, weight, bias=bias)
    assert is_torch(linear(x, weight, add=add), x, weight, add=add)


def test_the_result_is_where_it_is_asked_for() -> None:
    linear, x, weight, add = TunedLinear(), aligned(20, 32), aligned(16, 32), aligned(20, 16)
    linear.use({Product(20, 16, 32, torch.bfloat16, False, plus): marking(7 + plus) for plus in (False, True)})
    out = aligned(20, 16)
    assert linear(x, weight, out=out) is out
    kept = add.clone()
    assert linear(x, weight, add=add).unique().tolist() == [8]
    assert torch.equal(add, kept)
    assert linear(x, weight, add=add, out=add) is add
    assert add.unique().tolist() == [8]


def test_operands_that_no_algorithm_takes_are_torchs() -> None:
    linear, x, weight = TunedLinear(), aligned(21, 32), aligned(16, 32)
    linear.use({Product(20, 16, 32, torch.bfloat16, False, False): marking(7)})
    assert is_torch(linear(x[1:], weight), x[1:], weight), "rows that begin elsewhere"
    wide = aligned(20, 32)
    strided = aligned(20, 64)[:, :32].copy_(wide)
    assert is_torch(linear(strided, weight), strided, weight)
    out = aligned(20, 32)[:, :16]
    assert linear(wide, weight, out=out) is out
    assert is_torch(out, wide, weight)


def test_an_algorithm_that_fails_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    linear, x, weight = TunedLinear(), aligned(20, 32), aligned(16, 32)
    product, other = (
        Product(20, 16, 32, torch.bfloat16, False, False),
        Product(21, 16, 32, torch.bfloat16, False, False),
    )
    linear.use({product: failing, other: marking(7)})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert is_torch(linear(x, weight), x, weight)
    assert len([record for record in caplog.records if "products: torch computes" in record.message]) == 1
    assert list(linear.table) == [other]


def test_products_are_watched() -> None:
    linear, x, weight, bias = TunedLinear(), aligned(20, 32), aligned(16, 32), aligned(16)
    linear(x, weight)
    with linear.watched() as calls:
        linear(x, weight, bias)
        linear(x[:3], weight, add=aligned(3, 16))
    linear(x, weight)
    assert [call.product[:3] + call.product[4:] for call in calls] == [
        (20, 16, 32, True, False),
        (3, 16, 32, False, True),
    ]
    assert calls[0].weight is weight
    assert calls[0].bias is bias


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda linear: pickle.loads(pickle.dumps(linear))])
def test_copies_begin_with_an_empty_table(copied: type) -> None:
    linear = TunedLinear()
    linear.use({Product(20, 16, 32, torch.bfloat16, False, False): marking(7)})
    made: TunedLinear = copied(linear)
    assert made is not linear
    assert not made.table
    assert linear.table
