"""`scripts/bench kernels` on tiny shapes: what is timed, what is checked, and that a kernel that fails is no end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import kernels, linear_cases
from bench.expert_cases import experts
from bench.kernel_cases import KINDS, Case, Model, Way, Work
from bench.linear_cases import Linear
from outpace.kernels.gemv import fused_linear_torch

RATES = {"read": 1e9, "copy": 1e9, "product": 1e10}


def gemv(x: Tensor, weight: Tensor, *, pdl: bool = False, config: Any = None, **options: Any) -> Tensor:
    """In place of the kernel, which needs a GPU."""
    return fused_linear_torch(x, weight, **options)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cases, "gemv_triton", gemv)


def run(folder: Path, *options: str) -> list[dict[str, Any]]:
    kernels.main(["--out", str(folder), *options])
    (file,) = folder.glob("kernels_*.json")
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_the_linears_of_a_rank(tmp_path: Path) -> None:
    rows = run(tmp_path, "--models", "tiny:2", "--only", "gemv")
    assert [(row["what"], row["way"]) for row in rows] == [
        (what, way)
        for what in ("qkv 1 x 32 x 32", "o 1 x 32 x 16", "gate_up 1 x 48 x 32", "down 1 x 32 x 24", "head 1 x 128 x 32")
        for way in ("own", "torch")
    ]
    assert all(row["us"] > 0 and row["of limit"] > 0 for row in rows)


def test_several_rows_are_timed_with_the_kernel_of_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def few_rows(x: Tensor, weight: Tensor, *, counts: Any = None, **options: Any) -> Tensor:
        seen.append(len(x))
        return fused_linear_torch(
            x, weight, **{name: options[name] for name in ("norm", "act", "gated") if name in options}
        )

    monkeypatch.setattr(linear_cases, "few_rows_triton", few_rows)
    run(tmp_path, "--models", "tiny", "--only", "gemv", "--rows", "3")
    assert set(seen) == {3}


def test_kinds_of_weights_that_a_part_does_not_have_are_left_out() -> None:
    asked = {part: kernels.kinds_of(part, ("int8", "none")) for part in ("gemv", "packed", "experts")}
    assert asked == {"gemv": [], "packed": ["int8"], "experts": ["int8", "none"]}
    assert kernels.kinds_of("experts", ()) == ["none"]
    assert kernels.kinds_of("packed", ()) == list(KINDS)


def test_a_sweep_has_the_fastest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles(*_: Any) -> Iterator[Way]:
        yield Way("without what is fused", gemv)

    monkeypatch.setattr(linear_cases, "_gemv_tiles", tiles)
    rows = run(tmp_path, "--models", "tiny", "--only", "gemv", "--sweep")
    some = [row for row in rows if row["what"].startswith("o ")]
    assert [row["us"] for row in some] == sorted(row["us"] for row in some)
    assert {row["way"] for row in some} == {"own", "torch"}, "a wrong result is left out"


def test_what_is_wrong_or_fails_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("out of resource")

    def leaves_out(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    ways = [Way("right", torch.neg), Way("fails", fails), Way("nothing written", leaves_out), Way("wrong", torch.abs)]
    case = Case("k", "c", [(torch.ones(3),)], ways, 1.0, "read", lambda: -torch.ones(3))
    assert [row["way"] for row in kernels.time_case(case, RATES, sweep=False)] == ["right"]
    out = capsys.readouterr().out
    assert "k, c: fails: RuntimeError('out of resource')" in out
    assert "k, c: nothing written: ArithmeticError('error nan" in out
    assert "k, c: wrong: ArithmeticError('error 2" in out


def test_routing_and_experts(tmp_path: Path) -> None:
    rows = run(tmp_path, "--models", "tiny-moe", "--only", "experts", "--rows", "1", "16")
    found = {(row["kernel"], row["what"], row["way"]) for row in rows}
    assert {("route", "1 tokens", "torch"), ("experts", "16 tokens", "torch")} <= found
    assert {row["limit"] for row in rows} == {"copy", "read"}


@pytest.mark.parametrize("wrong", ["nobody", "tiny:many"])
def test_models_that_do_not_exist(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--models", wrong)
    assert f"--models: {wrong} is not NAME or NAME:RANKS" in capsys.readouterr().err


def test_candidates_of_real_shapes() -> None:
    sizes = Model.of("llama-3.1-8b:8").linears()
    assert sizes == {
        "qkv": (768, 4096), "o": (4096, 512), "gate_up": (1792, 4096), "down": (4096, 1792), "head": (16032, 4096),
    }  # fmt: skip
    assert Model.of("llama-3.1-70b:4").linears()["gate_up"] == (7168, 8192)
    for rows, outputs, depth in ((1, 6144, 4096), (256, 4096, 14336)):
        each = Linear("o", rows, outputs, depth, "int8", ())
        for found in (
            linear_cases._gemv_tiles(gemv, rows, depth), linear_cases._invariant_tiles(rows, outputs, depth),
            linear_cases._packed_tiles(each),
        ):  # fmt: skip
            names = [way.name for way in found]
            assert len(names) == len({*names}), "each once"
    assert [*experts(Model.of("tiny"), Work((1,), ("none",)))] == []
