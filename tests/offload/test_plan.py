"""Plans: within every budget, never slower than everything streamed, never slower with more memory."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import ConfigError
from outpace.offload import asked
from outpace.offload.numbers import Budgets, Efficiency, Experts, Layer, Numbers, Rates, Work
from outpace.offload.place import Placement, everywhere
from outpace.offload.plan import SLOTS, STAGING, Plan, batches, best_plan, plans, relief
from outpace.offload.predict import Schedule, predict

RATES = Rates(bandwidth=4e3, flops=8e5, link=50.0, disk=5.0)
PRECISE = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, {}, 0.0, 0.0, 0.0)
"""Rates are reached, and nothing is waited for."""


def numbers(layers: list[int], experts: int = 0) -> Numbers:
    """Layers of so many weights of 2 bytes, or half as many in int4."""

    def layer(size: int) -> Layer:
        own = {"bf16": 2 * size, "int4": -(-size // 2)}
        if not experts:
            return Layer(own, 2 * size, kv_bytes=2, attention_flops=8)
        some = Experts(experts, 1, {"bf16": 2 * size, "int4": -(-size // 2)})
        return Layer({name: (1 + experts) * value for name, value in own.items()}, 4 * size, 2, 8, experts=some)

    rest = {"bf16": 40, "int4": 20}
    return Numbers(tuple(map(layer, layers)), rest, rest, 20, 50, 1, 1, 1, page=4)


MODELS = st.builds(
    numbers,
    st.one_of(
        st.lists(st.integers(10, 60), min_size=1, max_size=8),
        st.builds(lambda size, number: [size] * number, st.integers(10, 60), st.integers(1, 16)),
    ),
    st.sampled_from([0, 0, 4]),
)
BUDGETS = st.builds(Budgets, st.integers(100, 4000), st.integers(0, 4000), st.none() | st.integers(0, 4000))
WORK = st.builds(Work, st.integers(1, 40), st.integers(1, 8), st.integers(1, 9))
SPEEDS = st.builds(
    Rates,
    st.sampled_from([1e3, 4e3]),
    st.sampled_from([1e4, 8e5]),
    st.none() | st.sampled_from([50.0, 900.0]),
    st.none() | st.sampled_from([5.0, 60.0]),
)
BOTH = ("bf16", "int4")


def found(model: Numbers, budgets: Budgets, rates: Rates, work: Work) -> list[Plan]:
    try:
        return plans(model, budgets, rates, work, precisions=BOTH)
    except ConfigError:
        return []


def best(model: Numbers, budgets: Budgets, rates: Rates, work: Work) -> float:
    try:
        return best_plan(model, budgets, rates, work, precisions=BOTH).tokens_per_second
    except ConfigError:
        return 0.0


@settings(max_examples=60, deadline=None)
@given(MODELS, BUDGETS, SPEEDS, WORK)
def test_no_plan_is_over_a_budget(model: Numbers, budgets: Budgets, rates: Rates, work: Work) -> None:
    for plan in found(model, budgets, rates, work):
        places, sizes = plan.places, model.sizes(plan.precision)
        assert places.device <= budgets.device
        assert places.host + places.staging <= budgets.host
        assert places.disk <= (budgets.disk or 0)
        assert places.layers + places.host + places.disk == sum(sizes)
        assert len(plan.placement.tiers) == len(sizes)
        assert places.ring == plan.placement.device_bytes(sizes) - places.layers
        assert places.kv == plan.schedule.batch * model.kv_bytes(work.prompt + work.new)
        assert 1 <= plan.schedule.batch <= work.requests
        assert plan.schedule.step_tokens >= plan.schedule.batch
        assert plan.tokens_per_second > 0


@settings(max_examples=60, deadline=None)
@given(MODELS, BUDGETS, SPEEDS, WORK)
def test_the_best_plan_is_no_slower_than_everything_streamed(
    model: Numbers, budgets: Budgets, rates: Rates, work: Work
) -> None:
    table = found(model, budgets, rates, work)
    if not table:
        return
    fastest = best_plan(model, budgets, rates, work, precisions=BOTH)
    assert fastest == best_plan(model, budgets, rates, work, precisions=BOTH)
    for plan in table:
        streamed = predict(
            model,
            plan.precision,
            Placement(everywhere("host" if rates.link else "disk", len(model.layers)), 2),
            plan.schedule,
            rates,
            work,
        )
        assert plan.kind != "mixed" or plan.places.disk or plan.tokens_per_second >= streamed.tokens_per_second
        assert fastest.tokens_per_second >= plan.tokens_per_second
        again = predict(model, plan.precision, plan.placement, plan.schedule, rates, work)
        assert again == plan.prediction


@settings(max_examples=60, deadline=None)
@given(MODELS, BUDGETS, SPEEDS, WORK, st.integers(1, 2000), st.sampled_from(["device", "host", "disk"]))
def test_more_memory_is_never_slower(
    model: Numbers, budgets: Budgets, rates: Rates, work: Work, more: int, where: str
) -> None:
    larger = dataclasses.replace(budgets, **{where: (dataclasses.asdict(budgets)[where] or 0) + more})
    assert best(model, larger, rates, work) >= best(model, budgets, rates, work)


def test_a_step_takes_as_long_as_the_link_needs() -> None:
    model, work = numbers([100] * 8), Work(prompt=8, new=5, requests=2)
    plan = best_plan(model, Budgets(1300, 2000), RATES, work, precisions=["bf16"], efficiency=PRECISE)
    streamed = plan.placement.tiers.count("host")
    assert 0 < streamed < 8
    assert plan.prediction.decode.total == pytest.approx(streamed * 200 / 50)
    assert plan.prediction.binds == "link"
    assert plan.prediction.prompt_steps == 1
    assert plan.prediction.seconds == pytest.approx(200 / 50 + 5 * streamed * 200 / 50)
    assert plan.tokens_per_second == pytest.approx(2 * 5 / plan.prediction.seconds)


def test_what_fits_stays_on_the_device() -> None:
    plan = best_plan(numbers([100] * 8), Budgets(2500, 2000), RATES, Work(8, 4, 2), precisions=["bf16"])
    assert plan.placement == Placement(everywhere("device", 8), 0)
    assert (plan.places.ring, plan.places.host, plan.places.disk) == (0, 0, 0)
    assert plan.prediction.binds == "device bandwidth"


def test_a_slow_disk_binds() -> None:
    plan = best_plan(numbers([100] * 8), Budgets(1300, 900, 5000), RATES, Work(8, 4, 2), precisions=["bf16"])
    assert plan.places.disk
    assert plan.places.staging == STAGING * 200
    assert plan.prediction.binds == "disk"


def test_smaller_weights_are_faster_over_the_link() -> None:
    model, budgets, work = numbers([100] * 8), Budgets(700, 2000), Work(8, 4, 2)
    speeds = {p: best_plan(model, budgets, RATES, work, precisions=[p]).tokens_per_second for p in BOTH}
    assert speeds["int4"] > 3 * speeds["bf16"]
    assert best_plan(model, budgets, RATES, work, precisions=BOTH).precision == "int4"


def test_prompts_of_many_requests_load_each_layer_once() -> None:
    """Steps of one micro-batch would load all layers for each of them."""
    work = Work(prompt=600, new=2, requests=16)
    model = dataclasses.replace(numbers([30_000] * 8), token_workspace=100)
    plan = best_plan(model, Budgets(500_000, 480_000), RATES, work, precisions=["bf16"], micro_batches=64)
    assert plan.placement.slots == 2
    assert plan.schedule.batch == 16
    assert plan.schedule.micro_batches > 1
    assert plan.prediction.prompt_steps == 1


def test_slots_and_buffers_are_those_of_the_runtime() -> None:
    assert (SLOTS, STAGING) == (asked.SLOTS, asked.BUFFERS)


def test_few_tokens_read_few_experts() -> None:
    model = numbers([100] * 4, experts=4)
    layer = model.layers[0]
    assert layer.read_bytes("bf16", 1) == pytest.approx(400)
    assert layer.read_bytes("bf16", 1000) == pytest.approx(1000)
    one, many = (
        predict(model, "bf16", Placement(everywhere("device", 4), 0), Schedule(b, 64, 1), RATES, Work(8, 4, b), PRECISE)
        for b in (1, 64)
    )
    assert one.decode.reads < many.decode.reads + many.decode.products


def test_a_window_is_all_that_is_looked_at() -> None:
    model = numbers([100])
    windowed = dataclasses.replace(model, layers=(dataclasses.replace(model.layers[0], window=4),))
    place, schedule, work = Placement(everywhere("device", 1), 0), Schedule(1, 64, 1), Work(64, 2, 1)
    rates = Rates(bandwidth=4e3, flops=1e4)
    far = predict(model, "bf16", place, schedule, rates, work, PRECISE)
    near = predict(windowed, "bf16", place, schedule, rates, work, PRECISE)
    assert near.decode.reads + near.decode.products < far.decode.reads + far.decode.products
    assert near.prompt.reads + near.prompt.products < far.prompt.reads + far.prompt.products


def test_what_would_help_is_named() -> None:
    model, work = numbers([100] * 8), Work(8, 8, 2)
    helps = relief(model, Budgets(1300, 2000), RATES, work, precisions=["bf16"])
    assert list(helps.values()) == sorted(helps.values(), reverse=True)
    assert 1.5 < helps["link"] <= 2.0
    assert "device memory" in helps
    assert "compute" not in helps
    fits = relief(model, Budgets(9000, 2000), RATES, work, precisions=["bf16"])
    assert list(fits) == ["device bandwidth"]


def test_a_cpu_has_no_link_and_no_host_memory_beside_the_device() -> None:
    rates = Rates(4e3, 8e5, None, 60.0)
    plan = best_plan(numbers([100] * 8), Budgets(1600, 9000, 5000), rates, Work(8, 4, 2), precisions=["bf16"])
    assert set(plan.placement.tiers) == {"device", "disk"}
    assert plan.places.staging == 0
    assert plan.prediction.decode.link == 0


def test_batches_share_the_work_out() -> None:
    assert batches(1) == [1]
    assert {1, 2, 4, 8, 16, 32, 64, 96, 48} <= set(batches(96))
    assert max(batches(96)) == 96


@pytest.mark.parametrize(
    ("budgets", "rates", "message"),
    [
        (Budgets(300, 9000), RATES, r"^offload\.device_memory: .* give \d+ bytes more"),
        (Budgets(700, 100), RATES, r"^offload: .*1\.50 KB are missing.*offload\.nvme"),
        (Budgets(700, 100, 5000), Rates(4e3, 8e5, 50.0), r"no folder for a disk"),
    ],
)
def test_a_model_that_fits_nowhere_says_what_is_missing(budgets: Budgets, rates: Rates, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        best_plan(numbers([100] * 8), budgets, rates, Work(8, 4, 2), precisions=["bf16"])


def test_impossible_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^prompt: .* at least 1"):
        Work(prompt=0)
    with pytest.raises(ConfigError, match="at least one precision"):
        plans(numbers([10]), Budgets(100), RATES, Work(), precisions=[])


def test_a_slow_device_needs_few_rows_for_full_speed() -> None:
    """Reading the weights takes a CPU as long as products of a few rows, and one row must not cost dozens of them."""
    model, place, schedule = numbers([1000] * 4), Placement(everywhere("device", 4), 0), Schedule(1, 64, 1)
    cpu = Rates(bandwidth=30.0, flops=150.0)
    found = predict(model, "bf16", place, schedule, cpu, Work(8, 4, 1))
    least = predict(model, "bf16", place, schedule, cpu, Work(8, 4, 1), PRECISE)
    assert least.decode.total < found.decode.total < 2 * least.decode.total
