"""`scripts/bench ranks` on tiny shapes: one rank's steps beside their limits."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import ranks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BATCHES", (1, 3))
    monkeypatch.setattr(ranks, "LENGTHS", {"input_len": 9, "output_len": 6})
    monkeypatch.setattr(ranks, "LIMITS", {"max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": 64})


def run(folder: Path, *options: str) -> dict[str, Any]:
    ranks.main(["--out", str(folder), *options])
    (file,) = folder.glob("ranks_steps_*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_steps_of_ranks_and_one_that_fails(tmp_path: Path) -> None:
    found = run(tmp_path, "--ranks", "tiny:3,tiny-moe:4")
    assert [row["what"] for row in found["rows"]] == [
        "tiny, one of 3 ranks, none: steps FAILED: ModelError",
        *(f"tiny-moe, one of 4 ranks, none: step of {batch}" for batch in (1, 3)),
    ]
    assert all(row["figure"] > row["limit"] > 0 for row in found["rows"][1:])
    one, three = found["details"]["tiny-moe, one of 4 ranks, none: steps"]["batches"].values()
    assert three["limit_ms"] > one["limit_ms"]


def test_what_comes_too_late_is_a_row(tmp_path: Path) -> None:
    found = run(tmp_path, "--ranks", "tiny:2", "--seconds", "-1")
    assert [row["what"] for row in found["rows"]] == ["tiny, one of 2 ranks, none: steps LEFT OUT: no time"]


@pytest.mark.parametrize("wrong", ["tiny", "nobody:2"])
def test_what_does_not_exist(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--ranks", wrong)
    assert f"{wrong} is not NAME:RANKS" in capsys.readouterr().err
