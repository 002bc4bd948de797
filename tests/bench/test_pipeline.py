"""`outpace bench pipeline`: the timeline of stages, and figures beside their formulas."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace.bench.pipeline import Experiment, Turn, figures
from outpace.bench.plot import plot_pipeline
from outpace.bench.tables import pipeline_table
from outpace.errors import InputError
from outpace.parallel.trace import ENVIRONMENT
from tests.cli.command import run as outpace
from tests.parallel.schedules import pipeline as schedule

FACTS = {"model": "tiny", "dtype": "float32", "device": "cpu"}


def shown(found: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(pipeline_table(found))
    return console.export_text()


def test_an_ideal_pipeline_is_as_its_formulas_say(tmp_path: Path) -> None:
    experiment = Experiment(pp=2, micro_batches=16, turns=2)
    ideal = {stage: [span._replace(cpu=0.1) for span in spans] for stage, spans in schedule(2, 16, took=0.1).items()}
    turns = [Turn(3.6, 3.3, 2.4, ideal, None), Turn(3.2, 3.2, 1.7, ideal, 1.5)]
    found = figures(turns, experiment, FACTS)
    assert found["speedup"] == pytest.approx(found["ideal_speedup"]) == pytest.approx(32 / 17)
    assert found["bubble"] == pytest.approx(found["bubble_formula"]) == pytest.approx(1 / 17)
    assert found["bubble_steady"] == pytest.approx(0, abs=1e-9)
    assert found["median_speedup"] == pytest.approx((3.6 / 2.4 + 3.2 / 1.7) / 2)
    assert found["stage_ms"] == {0: pytest.approx(100), 1: pytest.approx(100)}
    by_cpu = found["by_cpu_time"]
    assert (by_cpu["one_process_seconds"], by_cpu["pipeline_seconds"]) == (3.2, pytest.approx(1.7))
    assert by_cpu["of_ideal"] == pytest.approx(1)
    assert by_cpu["bubble"] == pytest.approx(1 / 17)
    text = shown(found)
    assert re.search(r"times as fast +│ +1\.882 │ +1\.882 │ +1\.000", text)
    assert re.search(r"idle: bubble.* │ +0\.0588 │ +0\.0588", text)
    assert "busy machine: other programs used 1.5 of" in text
    plot_pipeline(found, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {words} -->" in drawn for words in ("stage 0", "stage 1", "16"))
    assert "idle 5.9%" in drawn


def test_the_fastest_turn_is_drawn() -> None:
    slow, fast = (schedule(2, 4, took=took) for took in (0.3, 0.2))
    found = figures(
        [Turn(1.6, 1.6, 1.5, slow, None), Turn(1.7, 1.7, 1.0, fast, None)], Experiment(micro_batches=4), FACTS
    )
    assert found["timeline"][0][0] == [0, 0.0, 0.2, 0.0, 0.0]
    assert found["by_cpu_time"] is None, "no CPU time was recorded"
    assert found["speedup"] == pytest.approx(1.6 / 1.0)
    assert "busy machine" not in shown(found)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pp": 1}, "pp: must be at least 2"),
        ({"micro_batches": 0}, "micro-batches: must be at least 1"),
        ({"tokens": 4}, "tokens: must be at least 8"),
        ({"turns": 0}, "turns: must be at least 1"),
        ({"threads": 0}, "threads: must be at least 1"),
        ({"pp": 3, "layers": (4, 4)}, "layers: 2 numbers for 3 stages"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        Experiment(**options)


def test_two_stages_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    files = ("--output-json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    sizes = ("--pp", "2", "--micro-batches", "5", "--tokens", "16", "--turns", "1", "--layers", "1,1")
    result = outpace("bench", "pipeline", "tiny", "--device", "cpu", *sizes, *files)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "tiny in float32 on cpu-" in result.stdout
    assert "2 stages, 5 micro-batches of 16 tokens" in " ".join(result.stdout.split())
    found = json.loads((tmp_path / "a.json").read_text())
    first, last = found["timeline"]["0"], found["timeline"]["1"]
    assert len(first) == len(last) == 5, "one step for each micro-batch"
    for (step, begin, end, *_), (other, later, done, waited, cpu) in zip(first, last, strict=True):
        assert step == other
        assert begin < end
        assert later < done
        assert begin < later, "the last stage has what the first one sent"
        assert waited >= 0
        assert cpu >= 0
    assert 0 < found["bubble"] < 1
    assert 0 <= found["bubble_steady"] < 1
    assert found["bubble_formula"] == pytest.approx(1 / 6)
    assert found["outpace"]["layers"] == [1, 1]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_layers_are_numbers() -> None:
    result = outpace("bench", "pipeline", "tiny", "--layers", "one,1")
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("layers: expected numbers")
