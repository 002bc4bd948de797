"""The products of a model's steps, tuned at the start: with a cublasLt in Python and a clock that is told."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.cache.kv_cache import allocate
from outpace.inject.paged import PagedModel
from outpace.kernels import cublaslt
from outpace.kernels.cublaslt import CublasLt, Plan, Product, Unavailable
from outpace.kernels.dispatch import choose_kernels
from outpace.kernels.library import TunedLinear
from outpace.runner import products
from outpace.runner.products import tune_products, unambiguous_shape
from outpace.runner.runner import Limits, Runner
from outpace.runner.step_graphs import Shape, shapes
from tests.inject import checks
from tests.kernels.fake_cublaslt import STREAM, FakeCublasLt
from tests.models import tiny

CPU = torch.device("cpu")
WANTED = shapes(20, 96)


class Clock:
    """Says that torch takes twice as long as anything else."""

    timings = 0

    def __call__(self, runs: Sequence[Callable[[], object]], launches: int = 1) -> list[float]:
        type(self).timings += 1
        return [100.0, *[50.0] * (len(runs) - 1)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCublasLt:
    found: Any = FakeCublasLt()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr(cublaslt, "ALIGNMENT", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(CublasLt, "find", lambda: CublasLt(found))
    monkeypatch.setattr(products, "identity", lambda device, version: {"version": version})
    monkeypatch.setattr(products, "DeviceClock", type("Counted", (Clock,), {"timings": 0}))
    return found


def started(monkeypatch: pytest.MonkeyPatch, family: str = "llama", linear: Any = None) -> tuple[PagedModel, Runner]:
    """A model whose kernels are those of a GPU as far as the linear goes."""
    kernels = dataclasses.replace(choose_kernels(CPU), linear=linear or TunedLinear())
    monkeypatch.setattr(checks, "choose_kernels", lambda device: kernels)
    fused, injected = checks.injected_copy(tiny(family).to(torch.bfloat16))
    model = PagedModel(fused, injected, 64)
    pages = allocate(model.kv_heads, 4, model.dtype, CPU)
    return model, Runner(model, pages, Limits(max_num_seqs=20, max_num_batched_tokens=96, max_model_len=64))


def table_of(model: PagedModel) -> Mapping[Product, Plan]:
    linear = model.kernels.linear
    assert isinstance(linear, TunedLinear)
    return linear.table


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_steps_are_computed_by_what_was_found(
    family: str, fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, runner = started(monkeypatch, family)
    sizes = [shape for shape in WANTED if shape.num_tokens >= 17]
    before = [runner.warm_up(shape).float() for shape in sizes]
    with caplog.at_level(logging.INFO):
        tune_products(model, runner, WANTED)
    table = table_of(model)
    assert f"products: {len(table)} of {len(table)} by cublasLt" in caplog.text
    assert {product.rows for product in table if product.outputs != 97} == {20, 64, 96}
    assert {product.rows for product in table if product.outputs == 97} == {20}, "the head has a row for each sequence"
    assert {product.add for product in table} == {False, True}
    assert {product.bias for product in table} == ({False, True} if family == "opt" else {False})
    fake.ran.clear()
    for shape, want in zip(sizes, before, strict=True):
        count = len(fake.ran)
        assert torch.allclose(runner.warm_up(shape).float(), want, rtol=0.1, atol=0.05)
        assert len(fake.ran) - count >= 8, "four products in each of two layers"


def test_the_next_start_reads_what_was_found(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, runner = started(monkeypatch)
    tune_products(model, runner, WANTED)
    clock = vars(products)["DeviceClock"]
    assert len(list((tmp_path / "products").glob("*.json"))) == 1
    timings = clock.timings
    assert timings > 0
    again, runner = started(monkeypatch)
    with caplog.at_level(logging.INFO):
        tune_products(again, runner, WANTED)
    assert clock.timings == timings
    assert table_of(again).keys() == table_of(model).keys()
    assert "0 searched" in caplog.text


def test_what_keeps_torchs_products(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, runner = started(monkeypatch, linear=choose_kernels(CPU, {"linear": "torch"}).linear)
    tune_products(plain, runner, WANTED)
    assert not fake.objects, "asked for torch"
    model, runner = started(monkeypatch)
    tune_products(model, runner, ())
    tune_products(model, runner, [Shape(32, 32, "decode")])
    assert not fake.objects, "nothing is captured"

    def missing() -> CublasLt:
        raise Unavailable("this torch has not loaded cublasLt")

    monkeypatch.setattr(CublasLt, "find", missing)
    with caplog.at_level(logging.INFO):
        tune_products(model, runner, WANTED)
    assert "products: as torch computes them (this torch has not loaded cublasLt)" in caplog.text
    assert not table_of(model)


def test_no_memory_for_a_search_leaves_torchs_products(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(products, "tune", full)
    model, runner = started(monkeypatch)
    with caplog.at_level(logging.INFO):
        tune_products(model, runner, WANTED)
    assert "products: as torch computes them (CUDA out of memory. Tried to allocate)" in caplog.text


class Two:
    """A rank of two; the first one is asked before the other."""

    size = 2

    def __init__(self, rank: int, sent: list[torch.Tensor], *, others: bool = True) -> None:
        self.rank, self.sent, self.others = rank, sent, others

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.pop(0))

    def least(self, number: int, device: torch.device) -> int:
        return min(number, int(self.others))


def test_ranks_do_as_the_first_one_does(fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = vars(products)["DeviceClock"], list[torch.Tensor]()
    first, runner = started(monkeypatch)
    monkeypatch.setattr(first, "ranks", Two(0, sent))
    tune_products(first, runner, WANTED)
    timings = clock.timings
    second, runner = started(monkeypatch)
    monkeypatch.setattr(second, "ranks", Two(1, sent))
    tune_products(second, runner, [*WANTED, Shape(128, 8, "chunks")])  # the first one knows nothing of that
    assert clock.timings == timings > 0
    assert table_of(second).keys() == table_of(first).keys()


def test_no_rank_is_tuned_if_another_cannot_be(fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[torch.Tensor]()
    first, runner = started(monkeypatch)
    monkeypatch.setattr(first, "ranks", Two(0, sent, others=False))
    tune_products(first, runner, WANTED)
    assert not table_of(first)
    second, runner = started(monkeypatch)
    monkeypatch.setattr(second, "ranks", Two(1, sent))
    fake.proposed = 0
    tune_products(second, runner, WANTED)
    assert not table_of(second)


def test_the_step_that_tells() -> None:
    assert unambiguous_shape(shapes(256, 2048)) == Shape(64, 256, "mixed")
    assert unambiguous_shape(shapes(64, 2048)) == Shape(2048, 64, "mixed"), "not one with as many sequences as tokens"
    assert unambiguous_shape(shapes(8, 2048)) == Shape(64, 8, "chunks")
    alone = [Shape(size, 1, "fresh") for size in (64, 128)]
    assert unambiguous_shape([*shapes(8, 2048), *alone]) == Shape(64, 1, "fresh")
    assert unambiguous_shape([*shapes(17, 2048), *alone]) == Shape(64, 17, "mixed")
    assert unambiguous_shape(shapes(4, 16)) is None
    assert unambiguous_shape(()) is None
