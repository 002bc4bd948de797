"""`scripts/bench runtime`: a part that fails does not lose the others, and what is asked for is checked first."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import runtime
from outpace.kernels.limits import Speed
from tests.models import tiny


def test_results_are_written_after_each_part_and_a_failure_is_one_row(tmp_path: Path) -> None:
    measured = runtime.Measured(tmp_path, "somewhere", Speed(1e12, 1e13), ["latency", "throughput"])

    def broken() -> Any:
        raise RuntimeError("out of luck")

    measured.part("m", "throughput", broken)
    measured.part("m", "latency", lambda: ([runtime.row("m: decode", 5.0, "tok/s", 10.0, ("them", 2.0))], {"a": 1}))
    measured.part("m", "sweep", broken)  # not asked for
    (file,) = tmp_path.glob("runtime_somewhere_*.json")
    found = json.loads(file.read_text())
    assert [row["what"] for row in found["rows"]] == ["m: throughput FAILED: RuntimeError", "m: decode"]
    assert (found["rows"][1]["of limit"], found["rows"][1]["times other"]) == (0.5, 2.5)
    assert found["details"] == {"m: throughput": {"error": "out of luck"}, "m: latency": {"a": 1}}
    assert "| m: decode | 5.000 | tok/s | 10.000 | 0.500 | 2 (them) | 2.500 |" in file.with_suffix(".md").read_text()


def test_a_model_is_started_and_what_it_cannot_hold_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("llama").save_pretrained(tmp_path / "tiny")
    options = ["--models", str(tmp_path / "tiny"), "--only", "throughput", "--max-model-len", "64"]
    monkeypatch.setattr(sys, "argv", ["runtime", "--out", str(tmp_path), *options])
    runtime.main()
    out = capsys.readouterr().out
    assert "tiny: ready" in out
    assert "throughput FAILED: InputError" in out


def test_parts_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["runtime", "--only", "latency,speed"])
    with pytest.raises(SystemExit):
        runtime.main()
    assert "there is no part speed; there are throughput, latency" in capsys.readouterr().err
