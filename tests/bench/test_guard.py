"""`scripts/bench guard` as a command, with a tiny model: rows, references, exit codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import guard, history
from outpace.bench.shapes import SHAPES
from outpace.kernels.limits import device_name

DEVICE = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
FAST = "batches,few-long"


def run(folder: Path, *options: str) -> int:
    return guard.main(["--tiny", "--out", str(folder), "--history", str(folder / history.NAME), *options])


def doctor(folder: Path, times: float, **changes: Any) -> None:
    """Make the ratios of the last run so many times what they were."""
    *earlier, last = history.read(folder / history.NAME)
    figures = {name: replace(each, ratio=each.ratio * times) for name, each in last.figures.items()}
    history.write(folder / history.NAME, [*earlier, replace(last, figures=figures, **changes)])


def test_the_whole_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part for part in guard.PARTS if part != "start"]  # that takes two new processes
    assert run(tmp_path, "--only", ",".join(parts), "--commit", "first") == 0
    out = capsys.readouterr().out
    assert f"no run on {DEVICE} in" in out
    assert "yet: this run becomes the reference" in " ".join(out.split())  # a long path wraps the line
    assert all(f"] tiny: {part}" in out for part in parts[:-1])
    (found,) = history.read(tmp_path / history.NAME)
    assert (found.commit, found.device, found.versions["torch"]) == ("first", DEVICE, torch.__version__)
    assert list(found.figures) == [
        *("tiny: throughput", "tiny: long prompts, prompt and output tokens", "tiny: step of 1", "tiny: step of 2"),
        *("tiny: first token of 16", "tiny: first token of 64", "tiny: SplitFuse, P95 between tokens"),
        "attention: 1 x 200 + 3 x 20 keys",
    ]
    for each in found.figures.values():
        ratio = each.figure / each.limit if each.unit.endswith("/s") else each.limit / each.figure
        assert each.ratio == pytest.approx(ratio, rel=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"history.jsonl", f"history_{DEVICE}.png"}


def test_exit_codes_follow_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--only", FAST, "--commit", "one") == 0
    doctor(tmp_path, 1e-6)
    assert run(tmp_path, "--only", FAST, "--commit", "two") == 0  # everything rose
    doctor(tmp_path, 1e6)
    capsys.readouterr()
    assert run(tmp_path, "--only", FAST, "--commit", "three") == 1
    out = capsys.readouterr().out
    assert "tiny: batches: again, since tiny: step of 1 fell by 100.0%" in out
    worse = [line for line in out.splitlines() if line.startswith("WORSE: ")]
    assert len(worse) == 3
    assert "tiny: step of 1 fell by 100.0% (allowed: 5%): " in worse[0]
    assert " of its limit; it was " in worse[0]
    assert worse[0].endswith("(two)")
    assert run(tmp_path, "--only", FAST, "--reference", "one") == 0
    assert run(tmp_path, "--only", "few-long", "--reference", "two", "--accept") == 0
    assert [sorted(each.fell)[:1] for each in history.read(tmp_path / history.NAME)] == [
        [], [], ["attention: 1 x 200 + 3 x 20 keys"], [], [],
    ]  # fmt: skip


def test_what_could_not_be_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--only", FAST) == 0
    doctor(tmp_path, 1e-6)

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(guard.MEASURES, "batches", broken)
    assert run(tmp_path, "--only", FAST) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WORSE: ")]
    assert worse[0] == "WORSE: tiny: batches could not be measured"
    assert [line.split(" was ")[0] for line in worse[1:]] == ["WORSE: tiny: step of 1", "WORSE: tiny: step of 2"]
    assert list(history.read(tmp_path / history.NAME)[-1].figures) == ["attention: 1 x 200 + 3 x 20 keys"]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--only", "speed"], "--only: there is no speed; there are throughput, long-prompts"),
        (["--models", "huge"], "--models: there is no huge; there are tiny, attention"),
        (["--models", "attention", "--only", "batches"], "--only: none of these models has the parts batches"),
        (["--band", "5"], "--band: must be between 0 and 1, got 5.0"),
        (["--reference", "abc"], f"--reference: no run abc on {DEVICE}; known: none"),
    ],
)
def test_bad_options(options: list[str], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, *options)
    assert ended.value.code == 2
    assert wrong in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_broken_history_is_told_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / history.NAME).write_text("{}\n")
    with pytest.raises(SystemExit) as ended:
        run(tmp_path)
    assert ended.value.code == 2
    assert "history.jsonl, line 1 is no run of the guard" in capsys.readouterr().err


def test_the_plan_names_shapes_and_parts_that_there_are() -> None:
    assert {*guard.PLAN} - {"attention"} <= {*SHAPES}
    assert {part for parts in guard.PLAN.values() for part in parts} <= {*guard.PARTS}
    assert guard.chosen_plan(guard.PLAN, None, None) == {model: list(parts) for model, parts in guard.PLAN.items()}
    assert guard.commit() != ""
