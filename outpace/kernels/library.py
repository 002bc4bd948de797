"""Products of linear layers by torch, or by an algorithm of cublasLt that was measured to be faster."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.cublaslt import CublasLtError, Plan, Product, fits
from outpace.kernels.matmul import matmul_torch
from outpace.log import logger


class LinearCall(NamedTuple):
    """A product that was computed, and its weight."""

    product: Product
    weight: Tensor
    bias: Tensor | None


class TunedLinear:
    """x @ weight.T + bias + add, by the algorithm that the table has for this product, otherwise by torch.

    Each model has its own. The table is empty until `use` is called; copies begin with an empty one.
    """

    def __init__(self) -> None:
        self._table: Mapping[Product, Plan] = MappingProxyType({})
        self._calls: list[LinearCall] | None = None

    def __reduce__(self) -> tuple[type["TunedLinear"], tuple[()]]:
        return TunedLinear, ()

    @property
    def table(self) -> Mapping[Product, Plan]:
        """The products that cublasLt computes."""
        return self._table

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x: [M, K], weight: [N, K] → [M, N]; out may be add."""
        if self._calls is not None:
            self._calls.append(LinearCall(Product.of(x, weight, bias, add), weight, bias))
        if self._table:
            product = Product.of(x, weight, bias, add)
            plan = self._table.get(product)
            if plan is not None and fits(x, weight, bias, add, out):
                try:
                    return by_plan(plan, x, weight, bias, add=add, out=out)
                except CublasLtError as error:
                    self._drop(product, error)
        return matmul_torch(x, weight, bias, add=add, out=out)

    def use(self, table: Mapping[Product, Plan]) -> None:
        """Compute these products by these plans from now on, in addition to those of earlier calls."""
        self._table = MappingProxyType({**self._table, **table})

    @contextmanager
    def watched(self) -> Iterator[list[LinearCall]]:
        """The products that are computed inside the `with`."""
        calls: list[LinearCall] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    def _drop(self, product: Product, error: CublasLtError) -> None:
        logger.warning("products: torch computes %s from now on (%s)", product, error)
        self._table = MappingProxyType({each: plan for each, plan in self._table.items() if each != product})


def by_plan(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product by a plan, into `out` or new memory."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    plan(x, weight, bias, add, out)
    return out
