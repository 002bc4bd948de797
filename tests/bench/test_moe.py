"""`scripts/bench moe` on a tiny shape: every part gives rows beside their limits, and a failure leaves the others."""

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import moe, runtime
from outpace.bench.latency import latency
from outpace.bench.workload import Workload


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "TOKENS", 64)
    monkeypatch.setattr(moe, "BATCHES", (1, 2))
    monkeypatch.setattr(moe, "COUNT", 4)
    monkeypatch.setattr(moe, "latency", partial(latency, input_len=4, output_len=8, iters=1))
    monkeypatch.setattr(runtime, "COUNT", 4)
    monkeypatch.setattr(runtime, "Workload", partial(Workload, input_len=4, output_len=4))


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["moe", "--out", str(folder), "--models", "tiny-moe", *options])
    moe.main()
    (file,) = folder.glob("moe_cpu-*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.usefixtures("small")
def test_parts_and_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, tmp_path, "--only", "grouped,decode,throughput", "--max-model-len", "64")
    rows = {row["what"].removeprefix("tiny-moe: "): row for row in found["rows"]}
    assert list(rows) == [
        *("experts of a layer, 64 tokens, torch", "torch, ready"),
        *("torch, decode of one", "torch, first token", "torch, step of 2"),
        *("torch, 4 mixed requests", "throughput, median between tokens"),
    ]
    assert rows.pop("torch, ready")["figure"] > 0
    for name in list(rows)[:5]:
        assert rows[name]["figure"] > 0
        assert rows[name]["limit"] > 0
    assert rows["torch, decode of one"]["of limit"] < 1
    assert rows["torch, step of 2"]["limit"] > 1e3 / rows["torch, decode of one"]["limit"]  # it touches more experts
    assert len(list(tmp_path.glob("moe_cpu-*_tiny-moe.png"))) == 1


@pytest.mark.usefixtures("small")
def test_quantized_ones_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--only", "grouped,decode", "--max-model-len", "64", "--quantization", "none,int4")
    found = run(monkeypatch, tmp_path, *asked)
    rows = {row["what"].removeprefix("tiny-moe: "): row for row in found["rows"]}
    assert list(rows)[:2] == ["experts of a layer, 64 tokens, torch", "experts of a layer, 64 tokens, torch int4"]
    assert rows["torch int4, decode of one"]["limit"] > 1.5 * rows["torch, decode of one"]["limit"]


@pytest.mark.usefixtures("small")
def test_a_start_is_measured_twice_and_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def start(model: str, options: Any, cache: Path) -> dict[str, float]:
        asked.append((model, options["kernels"], cache))
        return {"load": 2.0, "all": 5.0 - len(asked)}

    monkeypatch.setattr(moe, "_start", start)
    found = run(monkeypatch, tmp_path, "--only", "decode,start", "--experts", "triton")
    assert [(row["what"], row["figure"]) for row in found["rows"]] == [
        ("tiny-moe, triton: start FAILED: ConfigError", 0.0),  # Triton needs a GPU
        ("tiny-moe: triton, ready, kernel cache empty", 2.0),
        ("tiny-moe: triton, ready, kernel cache full", 1.0),
    ]
    assert asked[0] == asked[1]


def test_what_the_process_that_is_started_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "start.py").write_text(moe.START)
    monkeypatch.setattr(sys, "argv", ["-c", "tiny-moe", json.dumps({"max_model_len": 64, "max_num_seqs": 2})])
    runpy.run_path(str(tmp_path / "start.py"))
    took = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert took["all"] > took["load"] > 0


@pytest.mark.parametrize(
    "wrong", [("--only", "speed"), ("--models", "llama-3.1-8b"), ("--experts", "cutlass"), ("--quantization", "int3")]
)
def test_what_does_not_exist(
    wrong: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, *wrong)
    assert f"{wrong[0]}: there is no {wrong[1]}; there are " in capsys.readouterr().err
