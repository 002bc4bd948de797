"""The search for algorithms of cublasLt that are faster than torch's choice, by timing them on the device.

Both are timed with the weights of the model's own layers, one after the other, as steps read them: none of them is in
the L2 cache. All algorithms that cublasLt proposes run once; the fastest ones run again several times, in turn with
torch, and the best is taken if it is faster by more than the noise of the timings.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from outpace.kernels.cublaslt import Algorithm, CublasLtError, Plan, Product, fits
from outpace.kernels.library import LinearCall, by_plan
from outpace.kernels.matmul import matmul_torch
from outpace.log import chosen, logger

ROWS = range(17, 4097)
"""Rows of the products that are searched: other kernels compute fewer, and with more all algorithms are alike."""
NOISE = 0.03  # slightly more than two timings of one product differ by
FINALISTS = 3  # algorithms that are timed again
LAUNCHES = 3  # of a short product in one of the later timings
SHORT = 60.0  # microseconds
ROUNDS = 2  # later timings
CHECKED_ROWS = 64  # of a product that are compared with torch's
WRONG = 0.02  # of the largest output: more than rounding explains
SLEEP = 80_000  # cycles of the device, longer than the host takes for one launch


class Library(Protocol):
    """The part of cublasLt that the search needs."""

    def proposals(self, product: Product) -> Sequence[Algorithm]:
        """Algorithms to try."""

    def checked(self, product: Product, data: bytes) -> Algorithm | None:
        """The algorithm of these bytes; None: it does not fit this product."""

    def plan(self, product: Product, algorithm: Algorithm) -> Plan:
        """A function that computes the product by this algorithm."""


class Clock(Protocol):
    """Times work on the device."""

    def __call__(self, runs: Sequence[Callable[[], object]], launches: int = 1) -> list[float]:
        """Microseconds of each run, which is called `launches` times."""


Found = Mapping[Product, bytes | None]
"""Results of a search: the bytes of an algorithm; None: torch is as fast."""


class DeviceClock:
    """Times launches one after the other, between events. The device sleeps until the host has launched them."""

    def __call__(self, runs: Sequence[Callable[[], object]], launches: int = 1) -> list[float]:
        """Microseconds of each run."""
        sleep = SLEEP * min(32, len(runs) * launches)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        for longer in (1, 4, 16):
            torch.cuda._sleep(sleep * longer)
            marks[0].record()
            for run, mark in zip(runs, marks[1:], strict=True):
                for _ in range(launches):
                    run()
                mark.record()
            late = marks[0].query()  # the device was faster than the host: it has waited for launches
            marks[-1].synchronize()
            if not late:
                break
        return [begin.elapsed_time(end) * 1e3 / launches for begin, end in itertools.pairwise(marks)]


@dataclass(frozen=True)
class Kind:
    """Products of a model that differ only in their number of rows."""

    product: Product
    """One of them."""
    operands: tuple[tuple[Tensor, Tensor | None], ...]
    """Weights of the model's layers, and their biases."""
    rows: tuple[int, ...]
    """The numbers of rows to search."""

    def products(self) -> list[Product]:
        """The products to search."""
        return [self.product._replace(rows=rows) for rows in self.rows]


def kinds_of(calls: Sequence[LinearCall], wanted: Mapping[int, Sequence[int]]) -> list[Kind]:
    """The products of a step that cublasLt can compute. wanted: the rows they will have, by the rows of this step."""
    found: dict[Product, dict[int, tuple[Tensor, Tensor | None]]] = {}
    for product, weight, bias in calls:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if product.rows in wanted and weight.dtype == product.dtype and fits(weight, weight, bias, None, None):
            found.setdefault(product, {})[weight.data_ptr()] = weight, bias
    return [
        Kind(product, tuple(operands.values()), tuple(rows for rows in wanted[product.rows] if rows in ROWS))
        for product, operands in found.items()
    ]


class Case:
    """A product to be timed. Each run takes the weight of the next layer, so that no weight is in the L2 cache."""

    def __init__(self, product: Product, kind: Kind, x: Tensor) -> None:
        self.product = product
        self._operands = kind.operands
        self._turn = itertools.cycle(kind.operands)
        self._x = x[: product.rows]

    @cached_property
    def _add(self) -> Tensor | None:
        """The tensor to which the results are added in place."""
        return self._x.new_zeros(self.product.rows, self.product.outputs) if self.product.add else None

    def run(self, multiply: Callable[..., Tensor]) -> None:
        """One product."""
        weight, bias = next(self._turn)
        multiply(self._x, weight, bias, add=self._add, out=self._add)

    def is_right(self, plan: Plan) -> bool:
        """Whether a plan computes what torch does, as far as rounding allows."""
        weight, bias = self._operands[0]
        add = None if self._add is None else torch.randn_like(self._add)
        want = matmul_torch(self._x, weight, bias, add=add)[:: -(-len(self._x) // CHECKED_ROWS)].float()
        got = by_plan(plan, self._x, weight, bias, add=add)[:: -(-len(self._x) // CHECKED_ROWS)].float()
        return bool((got - want).abs().max() <= WRONG * want.abs().max())


class Search:
    """Finds the fastest algorithms."""

    def __init__(self, library: Library, clock: Clock) -> None:
        self._library = library
        self._clock = clock
        self._loaded: set[bytes] = set()
        """Algorithms that have run: their kernels are on the device."""

    def fastest(self, case: Case) -> Algorithm | None:
        """The fastest algorithm, if it is faster than torch by more than noise; None: torch is as fast."""
        try:
            return self._fastest(case)
        except CublasLtError as error:  # of an algorithm that has computed another product
            logger.debug("products: %s is torch's (%s)", case.product, error)
            return None

    def _fastest(self, case: Case) -> Algorithm | None:
        plans = dict(self._runnable(case))
        own = partial(case.run, matmul_torch)
        own()
        runs = {each: partial(case.run, partial(by_plan, plan)) for each, plan in plans.items()}
        reference, *times = self._clock([own, *runs.values()])
        order = sorted(zip(times, runs, strict=True), key=lambda each: each[0])
        best = [each for took, each in order[:FINALISTS] if took < reference * (1 - NOISE / 2)]
        if not best:
            return None
        launches = LAUNCHES if reference < SHORT else 1
        again = [self._clock([own, *(runs[each] for each in best)], launches) for _ in range(ROUNDS)]
        reference, *times = (min(each) for each in zip(*again, strict=True))
        took, winner = min(zip(times, best, strict=True), key=lambda each: each[0])
        if took >= reference * (1 - NOISE) or not case.is_right(plans[winner]):
            return None
        return winner

    def load(self, case: Case, algorithm: Algorithm) -> Plan | None:
        """The plan of an algorithm, once it has run: its kernel must not be loaded during a capture. None: it fails."""
        try:
            plan = self._library.plan(case.product, algorithm)
            if algorithm.data not in self._loaded:
                case.run(partial(by_plan, plan))
                self._loaded.add(algorithm.data)
            return plan
        except CublasLtError as error:
            logger.debug("products: %s cannot be computed so (%s)", case.product, error)
            return None

    def _runnable(self, case: Case) -> Iterator[tuple[Algorithm, Plan]]:
        for algorithm in self._library.proposals(case.product):
            if (plan := self.load(case, algorithm)) is not None:
                yield algorithm, plan


@dataclass
class Tuned:
    """The result of a search."""

    plans: dict[Product, Plan] = field(default_factory=dict)
    """The plans of products that cublasLt computes faster."""
    taken: dict[Product, bytes | None] = field(default_factory=dict)
    """The algorithms of these plans."""
    found: dict[Product, bytes | None] = field(default_factory=dict)
    """Results that were not known before."""
    known: int = 0
    left: int = 0
    """Products that there was no time to search."""
    seconds: float = 0.0

    def log(self) -> None:
        """Log the choices in one line."""
        count, more = self.known + len(self.found), f", {self.left} left for the next start" if self.left else ""
        reason = f"faster than torch's choice; {len(self.found)} searched in {self.seconds:.2f} s, {self.known} known"
        chosen("products", f"{len(self.plans)} of {count + self.left} by cublasLt", reason + more)


def tune(kinds: Sequence[Kind], library: Library, clock: Clock, known: Found, seconds: float) -> Tuned:
    """Plans for these products, the ones of few rows first; torch computes what is not searched within `seconds`.

    known: earlier results, from the same device and the same versions.
    """
    begin, tuned, search = time.perf_counter(), Tuned(), Search(library, clock)
    inputs = _inputs(kinds)
    todo = [(product, kind) for kind in kinds for product in kind.products()]
    for product, kind in sorted(todo, key=lambda each: each[0].rows):
        case, stored = Case(product, kind, inputs[product.depth, product.dtype]), known.get(product)
        algorithm = None if stored is None else library.checked(product, stored)
        if product in known and (algorithm is None) == (stored is None):
            tuned.known += 1
        elif time.perf_counter() - begin < seconds:
            algorithm = search.fastest(case)
            tuned.found[product] = None if algorithm is None else algorithm.data
        else:
            tuned.left += 1
            continue
        if algorithm is not None and (plan := search.load(case, algorithm)) is not None:
            tuned.plans[product], tuned.taken[product] = plan, algorithm.data
    tuned.seconds = time.perf_counter() - begin
    return tuned


def _inputs(kinds: Sequence[Kind]) -> dict[tuple[int, torch.dtype], Tensor]:
    """Random rows for each depth, as many as the largest product has: zeros would take less power, and less time."""
    most: dict[tuple[int, torch.dtype], int] = {}
    devices = {}
    for kind in kinds:
        key = kind.product.depth, kind.product.dtype
        most[key] = max(most.get(key, 1), *kind.rows, 1)
        devices[key] = kind.operands[0][0].device
    return {
        (depth, dtype): torch.randn(rows, depth, dtype=dtype, device=devices[depth, dtype])
        for (depth, dtype), rows in most.items()
    }
