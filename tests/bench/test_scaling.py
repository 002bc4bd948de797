"""`scripts/bench scaling`: arithmetic on what was measured on one GPU."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bench import report, scaling
from bench.scaling import MODELS, Measured, Prediction, Share, collectives, experts_read, predict, predictions, tables
from outpace.bench.cost import cost_of
from outpace.bench.shapes import build, rank_shape
from outpace.llm import LLM

RANK_STEPS = {
    "llama-3.1-8b, one of 2 ranks, none: steps": {"batches": {"1": {"step_ms": 2.25}}},
    "qwen3-235b-a22b, one of 8 ranks, none: steps": {"batches": {"1": {"step_ms": 3.0}}},
    "llama-3.1-8b, one of 4 ranks, none: steps": {"error": "too late"},
    "llama-3.1-8b, one of 8 ranks, none: steps": None,
}


@pytest.fixture(scope="module")
def committed() -> Measured:
    return Measured(report.RESULTS)


@pytest.fixture
def with_ranks(tmp_path: Path) -> Measured:
    for path in report.RESULTS.glob("*_h200_*.json"):
        if path.name.startswith(("quantization", "runtime", "moe")):
            shutil.copy(path, tmp_path)
    (tmp_path / "ranks_steps_h200_2026-11-17.json").write_text(json.dumps({"details": RANK_STEPS}))
    return Measured(tmp_path)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_shares_are_what_a_started_rank_reads(name: str) -> None:
    shape = rank_shape(name, 2)
    module = build(shape, torch.bfloat16, "cpu")
    held = sum(weight.nbytes for weight in module.parameters())
    LLM(module, device="cpu", dtype=torch.bfloat16, max_model_len=64)
    cost, share = cost_of(module), Share.of(shape, "bf16")
    assert cost is not None
    assert (share.read_bytes, share.held_bytes) == (cost.weight_bytes, held)
    assert share.kv_bytes == cost.kv_bytes(1, 2)
    experts = [(kind.weight_bytes, count) for kind, count in cost.experts]
    assert experts == ([(share.expert_bytes, share.layers)] if share.expert_bytes else [])
    assert share.token_flops == pytest.approx(cost.token_flops + cost.head_flops, rel=0.05)  # norms count there


def test_experts_of_the_busiest_rank() -> None:
    assert experts_read(128, 8, 1, 1) == (8.0, 8.0)
    mean, most = experts_read(128, 8, 8, 1)
    assert mean == 1.0
    assert 2 < most < 3
    mean, most = experts_read(128, 8, 4, 32)
    assert mean == pytest.approx(32 * (1 - (1 - 8 / 128) ** 32), rel=0.01)
    assert mean < most < 32


def test_collectives_by_size_and_ranks() -> None:
    share = Share.of(rank_shape("llama-3.1-8b", 2), "bf16")
    assert collectives(share, 1, 1, "direct") == 0
    assert collectives(share, 8, 1, "direct") == pytest.approx(66 * 6.0e-6)
    assert collectives(share, 8, 64, "nccl") == pytest.approx(65 * 20.9e-6 + 17.2e-6)
    for kind, ranks in scaling.LATENCIES.items():
        for points in ranks.values():
            assert [*points] == sorted(points), kind
            assert [*points.values()] == sorted(points.values()), kind


def test_one_gpu_is_as_measured(committed: Measured) -> None:
    for batch in scaling.BATCHES:
        found = predict(committed, "llama-3.1-8b", "bf16", 1, batch)
        step = committed.whole("llama-3.1-8b", "bf16")[batch]
        assert (found.source, found.direct) == ("measured", 0)
        assert found.step == pytest.approx(1e3 * step.took)
        assert found.floor == pytest.approx(1e3 * step.floor, rel=1e-3)


def test_predictions_are_above_their_floors(committed: Measured) -> None:
    found = predictions(committed)
    assert len(found) == 3 * 2 * 4 * 4
    for each in found:
        assert each.floor < min(each.rank, each.by_share)
        assert each.direct < each.nccl or each.ranks == 1
    fitting = {model: [each.ranks for each in found if _fits(each, model)] for model in MODELS}
    assert fitting == {"llama-3.1-8b": [1, 2, 4, 8], "llama-3.1-70b": [2, 4, 8], "qwen3-235b-a22b": [4, 8]}


def _fits(each: Prediction, model: str) -> bool:
    return (each.model, each.weights, each.batch) == (model, "bf16", 1) and each.room > 0


def test_measured_ranks_take_the_place_of_predictions(with_ranks: Measured) -> None:
    dense = predict(with_ranks, "llama-3.1-8b", "bf16", 2, 1)
    assert dense.source == "measured"
    assert dense.rank == dense.by_share == pytest.approx(2.25)
    assert "ms*" in dense.cell
    moe = predict(with_ranks, "qwen3-235b-a22b", "bf16", 8, 1)
    assert moe.source == "measured"
    assert moe.rank > 3.0, "the busiest rank has more than its mean share of experts"
    for ranks, weights, batch in ((2, "bf16", 8), (2, "fp8", 1), (4, "bf16", 1), (8, "bf16", 1)):
        assert predict(with_ranks, "llama-3.1-8b", weights, ranks, batch).source == "predicted"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"quantization_h200.* have 'llama-3.1-8b, none: decode'; measure them first"):
        predict(Measured(tmp_path), "llama-3.1-8b", "bf16", 1, 1)


def test_the_document_has_these_tables(committed: Measured) -> None:
    text = (scaling.DOCS / "scaling.md").read_text()
    assert tables(predictions(committed)) in text, "write them anew: scripts/bench scaling --docs"


def test_results_and_the_document_are_written(
    with_ranks: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    (docs / "scaling.md").write_text(f"before\n{scaling.BEGIN}\nold\n{scaling.END}\nafter\n")
    monkeypatch.setattr(scaling, "DOCS", docs)
    monkeypatch.setattr(report, "RESULTS", with_ranks.folder)
    scaling.main(["--out", str(out), "--docs"])
    text = (docs / "scaling.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{scaling.END}\nafter\n")
    assert "old" not in text
    assert {path.suffix for path in [*out.iterdir(), *docs.iterdir()]} == {".json", ".md", ".png"}
