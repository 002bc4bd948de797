"""`scripts/bench cluster`: replicas over many nodes, and the queue in front of them."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench import cluster, cluster_show, report
from bench.cluster import checks, queues
from bench.cluster_model import BETWEEN, MOST, NODE, WORK, Layout, Model, Rates, Replica, choose, layouts
from bench.cluster_nodes import Choice, Cluster, choices
from bench.cluster_queue import Arrival, Latencies, Speed, arrivals, simulate
from bench.cluster_show import NODES, tables
from bench.scaling import DOCS, Measured, Share
from outpace.bench.shapes import SHAPES
from outpace.offload.numbers import Work
from outpace.parallel.stages import bubble

SPEED = Speed(slots=8, steps=[0.01 + 0.001 * size for size in range(9)], prompt_token=1e-5)
SHORT = Work(prompt=100, new=20)


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
    rows = checks(model)
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
        assert replica.batch <= min(replica.room, MOST * layout.in_flight)


def test_stages_wait_for_sends_unless_there_is_another_micro_batch(model: Model) -> None:
    exact, more = (model.replica("llama-3.1-8b", "bf16", Layout(2, 1, count), most=64) for count in (2, 3))
    assert exact.shares["waiting for stages"] > 0
    assert more.shares["waiting for stages"] == pytest.approx(0, abs=1e-12)
    assert more.rate > exact.rate
    few = model.replica("llama-3.1-8b", "bf16", Layout(4, 1, 1), most=64)
    assert few.shares["waiting for stages"] > bubble(4, 1), "one micro-batch keeps one of four stages busy"
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
        assert each.best.binds.split(",")[0] in each.best.shares
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
    for routers in (None, 1, 5):
        rates = [Cluster(nodes, replica, routers).rate for nodes in range(1, 50)]
        assert all(more >= fewer for fewer, more in pairwise(rates))
    for nodes in (1, 2, 3, 48):
        assert layout.replicas(nodes) * layout.gpus <= nodes * NODE
        assert layout.replicas(2 * nodes) >= 2 * layout.replicas(nodes)


def test_routers_bind_where_there_are_too_few(found: list[Choice]) -> None:
    small = found[0].best
    needed = Cluster(10, small).routers_needed
    assert Cluster(10, small, needed).rate == Cluster(10, small).rate
    assert Cluster(10, small, 1).rate < Cluster(10, small).rate
    assert Cluster(10, small, 2).rate == pytest.approx(2 * Cluster(10, small, 1).rate)
    assert Cluster(10, small, 1).dollars > Cluster(10, small).dollars


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


def run(load: float, replicas: int, count: int = 400, **options: object) -> Latencies:
    requests = arrivals(load * replicas * SPEED.capacity(SHORT), count, SHORT, seed=3)
    return simulate(SPEED, replicas, requests, **options)  # type: ignore[arg-type]


def test_one_request_alone() -> None:
    found = simulate(SPEED, 1, [Arrival(1.0, 2048, 11, 0)])
    first = 0.01 + 2048 * 1e-5
    assert found.first == [pytest.approx(first)]
    assert found.latencies == [pytest.approx(first + 10 * 0.011)]
    assert simulate(replace(SPEED, fill=0.5), 1, [Arrival(1.0, 2048, 11, 0)]).first == [pytest.approx(first + 0.5)]


@pytest.mark.parametrize("policy", ["least loaded", "round robin"])
@pytest.mark.parametrize(("replicas", "routers"), [(1, 1), (4, 1), (4, 3)])
def test_every_request_ends_and_little_s_law_holds(policy: str, replicas: int, routers: int) -> None:
    found = run(0.8, replicas, policy=policy, routers=routers)
    assert len(found.latencies) == 400
    assert sum(found.latencies) == pytest.approx(found.requests_seconds)
    assert found.first == sorted(found.first)
    assert found.percentile(0.5) <= found.percentile(0.95) <= found.percentile(1.0)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run(0.7, 2) == run(0.7, 2)
    some, others = (arrivals(1.0, 10, SHORT, seed) for seed in (0, 1))
    assert some != others
    assert sum(each.prompt for each in arrivals(1.0, 4000, SHORT, 0)) == pytest.approx(400_000, rel=0.03)


def test_load_and_replicas_change_first_tokens() -> None:
    by_load = [run(load, 1).percentile(0.95) for load in (0.3, 0.8, 1.2)]
    assert by_load == sorted(by_load)
    assert by_load[-1] > 10 * by_load[0], "beyond what it can do the queue grows"
    assert run(0.95, 8, 3000).percentile(0.95) < run(0.95, 1, 3000).percentile(0.95)
    assert run(0.95, 8, 3000).percentile(0.95) < run(0.95, 8, 3000, policy="round robin").percentile(0.95)


def test_a_saturated_replica_does_what_the_model_says(model: Model) -> None:
    replica = model.replica("llama-3.1-70b", "bf16", Layout(1, 2), most=16)
    speed = model.speed(replica)
    assert speed.capacity(WORK) * WORK.new == pytest.approx(replica.rate, rel=1e-6)
    requests = [Arrival(0.0, WORK.prompt, WORK.new, number) for number in range(160)]
    found = simulate(speed, 1, requests)
    assert 160 * WORK.new / max(found.latencies) == pytest.approx(replica.rate, rel=0.1)


def test_the_document_has_these_tables(found: list[Choice]) -> None:
    text = (DOCS / "scaling.md").read_text()
    assert tables(found) in text, "write them anew: scripts/bench cluster --docs"


def test_results_and_the_document_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    (docs / "scaling.md").write_text(f"before\n{cluster.BEGIN}\nold\n{cluster.END}\nafter\n")
    monkeypatch.setattr(cluster, "DOCS", docs)
    monkeypatch.setattr(cluster, "LOADS", (0.5,))
    monkeypatch.setattr(cluster, "queues", lambda model, replica: queues(model, _few(replica), slots=1))
    monkeypatch.setattr(cluster_show, "LIMITS", (0.05, 0.1))
    monkeypatch.setattr(sys, "argv", ["cluster", "--out", str(out), "--docs"])
    cluster.main()
    text = (docs / "scaling.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{cluster.END}\nafter\n")
    assert "old" not in text
    assert {path.suffix for path in [*out.iterdir(), *docs.iterdir()]} == {".json", ".md", ".png"}


def _few(replica: Replica) -> Replica:
    """With few requests at once, so that it is simulated quickly."""
    return replace(replica, batch=4)
