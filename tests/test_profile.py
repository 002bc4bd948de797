"""Times of forward and generate: how many, when cleared, and the table they make."""

import io
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import outpace
from outpace import InferenceEngine, NotSupported, StateError
from outpace.profile import Profiler
from tests.models import prompts, tiny

IDS = prompts(6)[0][None]


class Block(nn.Module):
    """Adds one, or raises; calls itself when told to."""

    def forward(self, value: torch.Tensor, *, depth: int = 0, fail: bool = False) -> torch.Tensor:
        if depth:
            result: torch.Tensor = self(value, depth=depth - 1, fail=fail)
            return result
        if fail:
            raise ZeroDivisionError("no")
        return value + 1


class Outer(nn.Module):
    """A block inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, value: torch.Tensor, **options: Any) -> torch.Tensor:
        result: torch.Tensor = self.inner(value, **options)
        return result


def engine_of(model: nn.Module) -> InferenceEngine:
    return outpace.init_inference(model, dtype="fp32", device="cpu")


def summary(engine: InferenceEngine) -> dict[str, list[str]]:
    """The rows of the table by what stands first in them."""
    page = Console(file=io.StringIO(), width=200, color_system=None)
    engine.profile_summary(page)
    assert isinstance(page.file, io.StringIO)
    rows = [[cell.strip() for cell in line.split("│")] for line in page.file.getvalue().splitlines() if "│" in line]
    header = next(line for line in page.file.getvalue().splitlines() if "what" in line)
    for column in ("what", "count", "mean", "p50", "p95", "total"):
        assert column in header
    return {row[1]: row[2:-1] for row in rows}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second each time it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr("outpace.profile.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("events", [True, False])
def test_one_time_for_each_forward(events: bool) -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time(use_cuda_events=events)
    for _ in range(3):
        engine(IDS)
    assert engine.model_times() == [1000.0] * 3, "milliseconds"


def test_one_time_for_each_step_of_generate() -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time()
    engine.generate(IDS, max_new_tokens=5)
    assert len(engine.model_times()) == 5


def test_times_are_cleared_when_they_are_read() -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time()
    engine(IDS)
    assert len(engine.model_times()) == 1
    assert engine.model_times() == []
    engine(IDS)
    assert len(engine.model_times()) == 1


def test_it_must_be_on() -> None:
    engine = engine_of(tiny("llama"))
    engine(IDS)
    with pytest.raises(StateError, match="model_times: profiling is not on; call profile_model_time"):
        engine.model_times()
    with pytest.raises(StateError, match="profile_summary: profiling is not on"):
        engine.profile_summary()
    engine.profile_model_time()
    assert engine.model_times() == [], "times from before it was on"


def test_starting_again_forgets_what_was() -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time()
    engine(IDS)
    engine.profile_model_time()
    engine(IDS)
    assert len(engine.model_times()) == 1


@pytest.mark.usefixtures("clock")
def test_the_summary_counts_forward_and_generate() -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time()
    engine(IDS)
    engine.generate(IDS, max_new_tokens=4)
    engine.model_times()  # reading the times does not empty the summary
    rows = summary(engine)
    assert rows["forward"] == ["5", "1000.000", "1000.000", "1000.000", "5000.000"]
    assert rows["generate"] == ["1", *["9000.000"] * 4], "four forwards, with a look at the clock before and after each"
    assert not any("lm_head" in name for name in rows)


def test_modules_are_listed_when_asked_for() -> None:
    engine = engine_of(tiny("llama", num_hidden_layers=1))  # so few modules that all are listed
    engine.profile_model_time(modules=True)
    engine(IDS)
    engine(IDS)
    rows = summary(engine)
    assert {"model", "lm_head", "model.layers.0.self_attn", "model.layers.0.mlp"} <= rows.keys()
    assert rows["model.layers.0"][0] == "2"
    assert len(engine.model_times()) == 2, "submodules are counted as forwards"


def test_the_slowest_modules_are_listed() -> None:
    engine = engine_of(tiny("llama", num_hidden_layers=4))
    engine.profile_model_time(modules=True)
    engine(IDS)
    rows = summary(engine)
    assert "model" in rows, "it takes as long as all that is in it"
    assert len(rows) == 1 + 20


def test_the_summary_prints_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time()
    engine(IDS)
    engine.profile_summary()
    assert "forward" in capsys.readouterr().out


@pytest.mark.parametrize("modules", [False, True])
def test_an_error_in_forward_does_not_spoil_later_times(modules: bool) -> None:
    engine = engine_of(Outer())
    engine.profile_model_time(modules=modules)
    with pytest.raises(ZeroDivisionError):
        engine(torch.ones(1), fail=True)
    engine.model_times()
    for _ in range(3):
        engine(torch.ones(1))
    assert len(engine.model_times()) == 3
    if modules:
        before = int(summary(engine)["inner"][0])
        engine(torch.ones(1))
        assert int(summary(engine)["inner"][0]) == before + 1


def test_an_error_in_generate_does_not_spoil_later_times() -> None:
    engine = engine_of(tiny("llama"))
    engine.profile_model_time()
    with pytest.raises(outpace.InputError):
        engine.generate(IDS, max_new_tokens=10_000)
    engine.generate(IDS, max_new_tokens=2)
    assert len(engine.model_times()) == 2
    assert summary(engine)["generate"][0] == "1"


def test_a_module_that_calls_itself_is_timed_each_time() -> None:
    engine = engine_of(Outer())
    engine.profile_model_time(modules=True)
    engine(torch.ones(1), depth=2)
    rows = summary(engine)
    assert rows["inner"][0] == "3"
    assert rows["forward"][0] == "1"


def test_nothing_is_hooked_while_it_is_off() -> None:
    engine = engine_of(tiny("llama"))
    engine(IDS)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in engine.modules())


def test_modules_under_cuda_graphs_are_refused() -> None:
    profiler = Profiler(torch.device("cpu"))
    with pytest.raises(NotSupported, match=r"profile_model_time\(modules=True\)"):
        profiler.start(nn.Linear(1, 1), use_cuda_events=True, modules=True, graphs=True)
    with pytest.raises(StateError):
        profiler.take_times()


def test_paused_hooks_take_no_times() -> None:
    module, profiler = nn.Linear(1, 1), Profiler(torch.device("cpu"))
    profiler.start(module, use_cuda_events=True, modules=False, graphs=True)
    with profiler.measure("forward"), profiler.paused():
        module(torch.ones(1, 1))
    assert len(profiler.take_times()) == 1
    module(torch.ones(1, 1))
    assert len(profiler.take_times()) == 1


def test_a_forward_that_failed_leaves_no_clock_running() -> None:
    module, profiler = Block(), Profiler(torch.device("cpu"))
    profiler.start(module, use_cuda_events=True, modules=False, graphs=True)
    with pytest.raises(ZeroDivisionError):
        module(torch.ones(1), fail=True)
    profiler.take_times()
    with profiler.paused():
        module(torch.ones(1))
    assert profiler.take_times() == []
