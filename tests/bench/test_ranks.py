"""`scripts/bench ranks` on tiny shapes: one rank's linears and steps beside their limits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from bench import gemv_sweep, ranks
from outpace.kernels.gemv import gemv_ref


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def gemv(x: Tensor, weight: Tensor, *, pdl: bool, config: dict[str, int], **options: Any) -> Tensor:
        return gemv_ref(x, weight, **options)

    monkeypatch.setattr(gemv_sweep, "gemv_triton", gemv)
    monkeypatch.setattr(gemv_sweep, "TOLERANCE", 1.0)
    for name, value in {"BATCHES": (1, 3), "CONTEXT": 9, "STEPS": 2, "MAX_MODEL_LEN": 64, "MAX_TOKENS": 64}.items():
        monkeypatch.setattr(ranks, name, value)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["ranks", "--out", str(folder), *options])
    ranks.main()
    return {file.name.split("_")[1]: json.loads(file.read_text()) for file in folder.glob("ranks_*.json")}


def test_both_parts_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, tmp_path, "--ranks", "tiny:2,tiny-moe:4")
    linears, steps = found["linears"]["rows"], found["steps"]["rows"]
    assert [row["what"] for row in linears] == [
        *("tiny, one of 2 ranks: qkv 32 x 32", "tiny, one of 2 ranks: o 32 x 16"),
        *("tiny, one of 2 ranks: gate_up 24 x 32", "tiny, one of 2 ranks: down 32 x 24"),
        "tiny, one of 2 ranks: head 128 x 32",
        *("tiny-moe, one of 4 ranks: qkv 24 x 32", "tiny-moe, one of 4 ranks: o 32 x 8"),
        "tiny-moe, one of 4 ranks: head 64 x 32",
    ]
    assert all(0 < row["best us"] <= row["default us"] for row in linears)
    timed = found["linears"]["details"]["tiny, one of 2 ranks: linears"]["linears"][0]["timed"]
    assert len(timed) == 2 * len({tuple(each["config"].values()) for each in timed}), "each alone and overlapping"
    assert [row["what"].split(": ")[1] for row in steps] == ["step of 1", "step of 3"] * 2
    assert all(row["figure"] > row["limit"] > 0 for row in steps)
    one, three = found["steps"]["details"]["tiny-moe, one of 4 ranks, none: steps"]["batches"].values()
    assert three["floor_ms"] > one["floor_ms"]
    assert one["context"] > 9


def test_what_comes_too_late_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, tmp_path, "--ranks", "tiny:2", "--seconds", "-1")
    assert [each["rows"][0]["what"] for _, each in sorted(found.items())] == [
        "tiny, one of 2 ranks: linears LEFT OUT: no time",
        "tiny: nccl LEFT OUT: no time",
        "tiny, one of 2 ranks, none: steps LEFT OUT: no time",
    ]


def test_a_rank_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, tmp_path, "--ranks", "tiny:3,tiny:4", "--only", "steps")["steps"]["rows"]
    assert [row["what"] for row in rows] == [
        "tiny, one of 3 ranks, none: steps FAILED: ModelError",
        *(f"tiny, one of 4 ranks, none: step of {batch}" for batch in (1, 3)),
    ]


@pytest.mark.parametrize("wrong", [("--only", "speed"), ("--ranks", "tiny"), ("--ranks", "nobody:2")])
def test_what_does_not_exist(
    wrong: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, *wrong)
    assert wrong[1] in capsys.readouterr().err.splitlines()[-1]


def test_the_linears_of_the_ranks_that_are_asked_for() -> None:
    sizes = {
        each: {case.layer: (case.outputs, case.depth) for case in ranks.Rank.parse(each).cases()}
        for each in ranks.RANKS.split(",")
    }
    assert sizes["llama-3.1-8b:8"] == {
        "qkv": (768, 4096), "o": (4096, 512), "gate_up": (1792, 4096), "down": (4096, 1792), "head": (16032, 4096),
    }  # fmt: skip
    assert sizes["llama-3.1-70b:4"]["gate_up"] == (7168, 8192)
    for each in ranks.RANKS.split(","):
        for case in ranks.Rank.parse(each).cases():
            tiles = {choice.tile for choice in ranks.choices(case)}
            assert ranks.default_choice(case).tile in tiles
            assert 5 <= len(tiles) <= 13
