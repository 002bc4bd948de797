"""The search for the fastest algorithms, with a library that is made up and a clock that is told."""

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from outpace.kernels.cublaslt import Algorithm, CublasLtError, Plan, Product
from outpace.kernels.library import LinearCall
from outpace.kernels.matmul import matmul_torch
from outpace.kernels.product_search import Case, Found, Kind, Search, Tuned, kinds_of, tune
from tests.kernels.fake_cublaslt import aligned

TORCH = 100.0
PLAIN = Product(32, 16, 8, torch.bfloat16, False, False)


def named(number: int) -> bytes:
    return bytes([number]) * 64


class Made:
    """A library whose algorithms take what they are said to; some fail, some compute something else."""

    def __init__(self, *costs: float, fails: Sequence[int] = (), wrong: Sequence[int] = ()) -> None:
        self.costs = {named(number): cost for number, cost in enumerate(costs)}
        self.fails, self.wrong = {named(number) for number in fails}, {named(number) for number in wrong}
        self.running: bytes | None = None
        self.asked: list[Product] = []
        self.weights: list[int] = []

    def proposals(self, product: Product) -> list[Algorithm]:
        self.asked.append(product)
        return [Algorithm(data, 0) for data in self.costs]

    def checked(self, product: Product, data: bytes) -> Algorithm | None:
        return Algorithm(data, 0) if data in self.costs else None

    def plan(self, product: Product, algorithm: Algorithm) -> Plan:
        def run(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None, out: Tensor) -> None:
            if algorithm.data in self.fails:
                raise CublasLtError("no")
            self.running = algorithm.data
            self.weights.append(weight.data_ptr())
            assert Product.of(x, weight, bias, add) == product
            out.copy_(matmul_torch(x, weight, bias, add=add))
            if algorithm.data in self.wrong:
                out[-1, -1] += 10 * out.abs().max() + 1

        return run


class Told:
    """A clock that says what the library says, times what is given for each timing (torch first), then 1."""

    def __init__(self, library: Made, *noise: Sequence[float]) -> None:
        self.library, self.noise = library, list(noise)
        self.timings: list[int] = []

    def __call__(self, runs: Sequence[Callable[[], object]], launches: int = 1) -> list[float]:
        self.timings.append(len(runs))
        found = []
        for run in runs:
            self.library.running = None
            for _ in range(launches):
                run()
            found.append(TORCH if self.library.running is None else self.library.costs[self.library.running])
        noise = self.noise.pop(0) if self.noise else ()
        return [cost * factor for cost, factor in zip(found, [*noise, *[1.0] * len(found)], strict=False)]


def case(product: Product = PLAIN, layers: int = 2) -> Case:
    return Case(product, kind(product, layers), torch.randn(64, product.depth, dtype=product.dtype))


def kind(product: Product = PLAIN, layers: int = 2, rows: Sequence[int] = (32,)) -> Kind:
    operands = [
        (aligned(product.outputs, product.depth), aligned(product.outputs) if product.bias else None)
        for _ in range(layers)
    ]
    return Kind(product, tuple(operands), tuple(rows))


def fastest(library: Made, *noise: Sequence[float], product: Product = PLAIN) -> int | None:
    found = Search(library, Told(library, *noise)).fastest(case(product))
    return None if found is None else found.data[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_the_fastest_one_is_found(bias: bool, add: bool) -> None:
    product = PLAIN._replace(bias=bias, add=add)
    assert fastest(Made(99, 90, 80, 85, 120), product=product) == 2


def test_torch_stays_where_the_difference_may_be_noise() -> None:
    assert fastest(Made(100, 97.5, 98)) is None
    assert fastest(Made(100, 96.5, 98)) == 1
    assert fastest(Made(120)) is None
    assert fastest(Made()) is None


def test_one_fast_timing_is_not_enough() -> None:
    once = (1.0, 0.8)  # the algorithm, while torch is as it is
    assert fastest(Made(100), once) is None
    slow_torch = (1.2, 1.0)
    assert fastest(Made(100), slow_torch) is None
    assert fastest(Made(100), once, once) == 0, "the best of several timings counts"
    assert fastest(Made(100, 90), (1.0, 0.7, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)) == 1
    assert fastest(Made(90), (), (1.0, 1.2)) == 0, "one slow timing of the algorithm is noise"


def test_most_products_are_timed_once() -> None:
    library = Made(100, 101, 102)
    clock = Told(library)
    assert Search(library, clock).fastest(case()) is None
    assert clock.timings == [4]
    library = Made(90, 80, 70, 60, 50)
    clock = Told(library)
    Search(library, clock).fastest(case())
    assert clock.timings == [6, 4, 4], "torch and all, then torch and the three best"


def test_algorithms_that_fail_or_are_wrong_are_not_taken() -> None:
    assert fastest(Made(50, 90, fails=[0])) == 1
    assert fastest(Made(50, 120, wrong=[0])) is None
    assert fastest(Made(50, fails=[0])) is None


def test_an_algorithm_that_fails_for_another_product() -> None:
    library = Made(100, 50)
    search = Search(library, Told(library))
    assert search.fastest(case()) is not None
    library.fails.add(named(1))
    assert search.fastest(case(PLAIN._replace(rows=40))) is None


def test_weights_take_turns() -> None:
    library = Made(90, 80, 70)
    Search(library, Told(library)).fastest(case(layers=3))
    assert len(set(library.weights)) == 3


def test_a_step_tells_the_kinds_of_its_products() -> None:
    weights = [aligned(16, 8) for _ in range(3)]
    head, bias = aligned(64, 8), aligned(16)
    calls = [LinearCall(PLAIN, weight, None) for weight in weights]
    calls += calls[:1]  # a weight that two layers share
    calls += [
        LinearCall(PLAIN._replace(bias=True), weights[0], bias),
        LinearCall(Product.of(aligned(4, 8), head, None, None), head, None),
    ]
    calls += [LinearCall(PLAIN._replace(dtype=torch.float32), weights[0].float(), None)]
    calls += [LinearCall(PLAIN._replace(rows=5), weights[0], None)]
    found = kinds_of(calls, {32: [1, 16, 17, 512, 9999], 4: [8, 24]})
    assert [(each.product.outputs, each.product.bias, len(each.operands), each.rows) for each in found] == [
        (16, False, 3, (17, 512)),
        (16, True, 1, (17, 512)),
        (64, False, 1, (24,)),
    ]


def tuned(library: Made, known: Found, seconds: float = 1e9, rows: Sequence[int] = (32, 17)) -> Tuned:
    return tune([kind(rows=rows)], library, Told(library), known, seconds)


def test_what_is_known_is_not_searched() -> None:
    library, first, second = Made(100, 50), PLAIN._replace(rows=17), PLAIN
    found = tuned(library, {})
    assert found.found == {first: named(1), second: named(1)}
    assert list(found.plans) == [first, second], "few rows come first"
    assert (found.known, found.left) == (0, 0)
    again = Made(100, 50)
    found = tuned(again, {first: named(1), second: None})
    assert not again.asked
    assert (list(found.plans), found.found, found.known) == ([first], {}, 2)


def test_what_is_known_and_does_not_work_is_searched_again() -> None:
    library = Made(100, 50)
    found = tuned(library, {PLAIN: named(9)}, rows=(32,))
    assert found.found == {PLAIN: named(1)}
    assert found.known == 0
    failing = Made(100, 50, fails=[1])
    assert not tuned(failing, {PLAIN: named(1)}, rows=(32,)).plans


def test_there_is_no_search_without_time(caplog: pytest.LogCaptureFixture) -> None:
    library = Made(100, 50)
    found = tuned(library, {PLAIN: named(1)}, seconds=0)
    assert (list(found.plans), found.found, found.known, found.left) == ([PLAIN], {}, 1, 1)
    with caplog.at_level(logging.INFO):
        found.log()
    assert "products: 1 of 2 by cublasLt" in caplog.text
    assert "1 left for the next start" in caplog.text
