"""`scripts/bench cluster`: replicas over many nodes."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench import cluster, report
from bench.cluster import NODES, Choice, Cluster, choices, tables
from bench.cluster_model import BETWEEN, MOST, NODE, WORK, Layout, Model, Rates, choose, layouts
from bench.scaling import DOCS, Measured, Share
from outpace.bench.shapes import SHAPES
from outpace.parallel.stages import bubble


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(Measured(report.RESULTS))


@pytest.fixture(scope="module")
def found(model: Model) -> list[Choice]:
    return choices(model)


def test_one_gpu_is_as_measured(model: Model) -> None:
    measured = model.measured.needed("runtime", "llama-3.1-8b: full-load")[1]
    replica = model.replica("llama-3.1-8b", "bf16", Layout())
    assert (replica.batch, replica.work) == (measured["outpace"]["max_num_seqs"], WORK)
    assert replica.rate == pytest.approx(measured["output_throughput"])
    assert model.factor == pytest.approx(1, abs=0.02), "the arithmetic says about the same by itself"
    decode = model.parts("llama-3.1-8b", "bf16", Layout(), MOST, WORK, prompts=False).total
    assert 1e3 * decode == pytest.approx(measured["median_itl_ms"], rel=0.05)
    rows = model.checks()
    assert [row["ratio"] == pytest.approx(1) for row in rows] == [True, False, False, False]
    assert all(1 < row["ratio"] < 1.2 for row in rows[1:]), "short runs lose something at their ends"


def test_a_part_of_the_layers_takes_a_part_of_the_time(model: Model) -> None:
    whole = model.parts("llama-3.1-70b", "bf16", Layout(1, 4), 64, WORK)
    assert model.parts("llama-3.1-70b", "bf16", Layout(4, 4), 64, WORK).total == pytest.approx(whole.total / 4)
    uneven = model.parts("qwen3-235b-a22b", "bf16", Layout(4, 4), 64, WORK).total
    alone = model.parts("qwen3-235b-a22b", "bf16", Layout(1, 4), 64, WORK).total
    assert uneven == pytest.approx(alone * 24 / 94), "the slowest stage has 24 of 94 layers"


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-235b-a22b"])
def test_memory_and_time_add_up(model: Model, name: str) -> None:
    whole = Share.of(SHAPES[name], "bf16").held_bytes
    for layout in (Layout(2, 4), Layout(8, 1), Layout(4, 4)):
        replica = model.replica(name, "bf16", layout)
        held = 1e9 * replica.gb * layout.gpus
        assert whole <= held < 1.02 * whole, "key heads and norms that several ranks have are all that is there twice"
        assert sum(replica.shares.values()) == pytest.approx(1)
        assert replica.batch <= min(replica.room, MOST * layout.pp)


def test_stages_wait_for_sends(model: Model) -> None:
    staged = model.replica("llama-3.1-8b", "bf16", Layout(2, 1), most=64)
    assert 0 < staged.shares["waiting for stages"] < 0.01
    inside, outside = (model.send(8192, 64, Layout(2, tp)) for tp in (4, 8))
    assert outside > inside


def test_a_prompt_fills_and_drains_the_pipeline(model: Model) -> None:
    free = Model(model.measured, replace(model.rates, nvlink_seconds=0.0, nvlink=math.inf))
    kind = "llama-3.1-8b", "bf16"
    alone, staged = (free.first_token(*kind, Layout(pp), 4096) for pp in (1, 4))
    assert staged / alone == pytest.approx(1 / 4 / (1 - bubble(4, 2)))
    assert free.first_token(*kind, Layout(4), 1000) == pytest.approx(free.first_token(*kind, Layout(), 1000))


def test_the_choice_is_quick_enough_and_cheap(model: Model, found: list[Choice]) -> None:
    assert len(found) == 8
    for each in found:
        assert each.best.between <= BETWEEN
        assert all(other.rate_of_gpu <= each.best.rate_of_gpu / 0.98 for other in each.every if other.between < BETWEEN)
        quick, slow = each.within(0.1), each.within(0.4)
        assert quick is not None
        assert slow is not None
        assert slow.dollars <= quick.dollars <= each.best.dollars
        assert each.within(1e-4) is None
    assert str(found[0].best.layout) == "PP 1 x TP 1"
    fits = {str(each.layout) for each in layouts(model, "llama-3.1-405b", "bf16")}
    assert "PP 1 x TP 8" in fits
    assert "PP 1 x TP 4" not in fits
    slowest = [each for each in layouts(model, "llama-3.1-405b", "bf16") if each.between > BETWEEN]
    assert choose(slowest) is slowest[0], "nothing is quick enough"


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 4), Layout(2, 8), Layout(3, 8)])
def test_more_nodes_are_never_slower(model: Model, layout: Layout) -> None:
    replica = model.replica("llama-3.1-70b", "fp8", layout)
    rates = [Cluster(nodes, replica).rate for nodes in range(1, 50)]
    assert all(more >= fewer for fewer, more in pairwise(rates))
    for nodes in (1, 2, 3, 48):
        assert layout.replicas(nodes) * layout.gpus <= nodes * NODE
        assert layout.replicas(2 * nodes) >= 2 * layout.replicas(nodes)


def test_failures_cost_what_they_last(found: list[Choice]) -> None:
    small, large = found[0].best, found[4].best
    never = Rates(mtbf=math.inf)
    assert Cluster(1, small, rates=never).rate == pytest.approx(NODE * small.rate)
    assert Cluster(1000, small, rates=never).spares == 0
    assert 0.99 < Cluster(1000, small).available < 1
    assert Cluster(1000, large).restart > Cluster(1000, small).restart
    often = replace(Rates(), mtbf=Rates().mtbf / 10)
    assert Cluster(1000, small, rates=often).rate < Cluster(1000, small).rate
    assert Cluster(1000, small, rates=often).spares > Cluster(1000, small).spares
    assert Cluster(1000, small).failures_a_day == pytest.approx(1000 * Cluster(1, small).failures_a_day)
    starts = [Cluster(nodes, large).first_start for nodes in NODES]
    assert starts == sorted(starts)
    spread = replace(large, layout=Layout(2, 8), gb=large.gb / 2)
    assert Cluster(10, spread).first_start < Cluster(10, large).first_start, "each node reads half of the model"


def test_the_document_has_these_tables(found: list[Choice]) -> None:
    text = (DOCS / "scaling.md").read_text()
    assert tables(found) in text, "write them anew: scripts/bench cluster --docs"


def test_results_and_the_document_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    (docs / "scaling.md").write_text(f"before\n{cluster.BEGIN}\nold\n{cluster.END}\nafter\n")
    monkeypatch.setattr(cluster, "DOCS", docs)
    cluster.main(["--out", str(out), "--docs"])
    text = (docs / "scaling.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{cluster.END}\nafter\n")
    assert "old" not in text
    assert {path.suffix for path in [*out.iterdir(), *docs.iterdir()]} == {".json", ".md", ".png"}
