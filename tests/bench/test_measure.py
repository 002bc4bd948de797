"""What the measurements say about a tiny model: every token counted once, nothing cut, and the engine left at rest."""

from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from outpace.bench.drive import Driver, run
from outpace.bench.figures import SPLIT, WHOLE
from outpace.bench.latency import latency
from outpace.bench.profiling import covered, profile_decode
from outpace.bench.splitfuse import Experiment, splitfuse
from outpace.bench.subject import Subject, started
from outpace.bench.tables import latency_table, throughput_table
from outpace.bench.throughput import sweep, throughput
from outpace.bench.workload import Item, Workload, uniform
from outpace.errors import InputError
from outpace.kernels.limits import Speed
from outpace.types import Step
from tests.models import VOCAB, tiny

SPEED = Speed(bandwidth=1e10, flops=1e11)
EXPERIMENT = Experiment(decoders=3, decoder_prompt=2, prompt=40, num_prompts=2, budget=16)


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu", "speed": SPEED}
    with started(tiny("llama", max_position_embeddings=512), **options) as found:  # type: ignore[arg-type]
        yield found
        assert not found.llm.engine.has_unfinished_requests


@pytest.fixture
def steps(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every step that is scheduled."""
    scheduler, seen = subject.llm.engine.scheduler, []
    schedule = scheduler.schedule

    def noting() -> Step:
        seen.append(schedule())
        return seen[-1]

    monkeypatch.setattr(scheduler, "schedule", noting)
    return seen


def small(count: int, seed: int = 1) -> list[Item]:
    return uniform(VOCAB, count, seed, prompt=(3, 30), output=(1, 9))


def test_every_token_is_noted_when_it_comes(subject: Subject) -> None:
    items = small(9)
    found = run(subject.llm.engine, items)
    assert [len(trace.times) for trace in found.traces] == [item.output_len for item in items]
    assert [trace.output.prompt_token_ids for trace in found.traces] == [item.prompt for item in items]
    for trace in found.traces:
        assert trace.output.finished
        assert trace.times == sorted(trace.times)
        assert 0 < trace.ttft <= found.seconds
        assert len(trace.gaps) == len(trace.times) - 1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_are_in_flight_than_asked_for(subject: Subject, concurrency: int, steps: list[Step]) -> None:
    run(subject.llm.engine, small(7), concurrency)
    assert max(len(step.sequences) for step in steps) == concurrency


def test_a_driver_that_is_closed_leaves_nothing_behind(subject: Subject) -> None:
    driver = Driver(subject.llm.engine)
    trace = driver.add(Item([3, 4], 50))
    for _ in range(4):
        driver.step()
    driver.close()
    assert 1 < len(trace.times) < 50
    assert trace.output.finished
    assert not subject.llm.engine.has_unfinished_requests


def test_figures_of_throughput(subject: Subject) -> None:
    items = small(6)
    found = throughput(subject, items, small(6, seed=2))
    tokens = sum(item.output_len for item in items)
    assert (found["num_requests"], found["completed"], found["total_output_tokens"]) == (6, 6, tokens)
    assert found["total_num_tokens"] == tokens + sum(len(item.prompt) for item in items)
    assert found["output_throughput"] * found["duration"] == pytest.approx(tokens)
    assert found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["duration"] * 1e3
    assert 0 < found["median_itl_ms"] <= found["p99_itl_ms"]
    ours, cost = found["outpace"], subject.cost
    assert cost is not None
    assert ours["limit"]["seconds"] == cost.work_seconds(items, 4, SPEED)
    assert ours["ratio"] == ours["limit"]["seconds"] / found["elapsed_time"]
    assert 0 < ours["ratio"] < 1
    assert (ours["concurrency"], ours["max_num_batched_tokens"], ours["device"][:4]) == (4, 64, "cpu-")
    assert ours["startup_seconds"]["all"] >= ours["startup_seconds"]["inject"] > 0


def test_experts_that_steps_touch_are_counted_while_it_warms_up() -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu", "max_model_len": 64}
    with started("tiny-moe", speed=SPEED, **options) as subject:
        assert subject.cost == subject.expected_cost
        found = throughput(subject, small(6), small(6, seed=2))
        ours, cost, expected = found["outpace"], subject.cost, subject.expected_cost
        assert cost is not None
        assert expected is not None
        assert ours["limit"]["seconds"] == cost.work_seconds(small(6), 4, SPEED)
        assert sum(tokens for tokens, _ in subject.touches) == sum(
            len(item.prompt) + item.output_len - 1 for item in small(6, seed=2)
        )
        assert all(2 <= touched <= min(8, 2 * tokens) for tokens, touched in subject.touches)
        assert ours["experts_touched"] == cost.touched(4) != expected.touched(4)
        assert ours["experts_counted"]
        single = latency(subject, input_len=5, output_len=8, iters=1)["outpace"]
        assert (single["experts_touched"], single["experts_counted"]) == (2.0, True)
        console = Console(width=100)
        with console.capture() as shown:
            console.print(throughput_table(found, "some"), latency_table(latency(subject, input_len=5, output_len=8)))
        assert shown.get().count("experts of a layer in a full step, counted") == 2


def test_requests_that_do_not_fit_are_refused_before_anything_runs(subject: Subject, steps: list[Step]) -> None:
    with pytest.raises(InputError, match="max-model-len: the longest request has 513 tokens"):
        throughput(subject, [Item([3], 512)], small(2))
    assert steps == []


def test_a_sweep_has_four_requests_for_each_place(subject: Subject) -> None:
    source = Workload(input_len=4, output_len=3).source(VOCAB, subject.tokenize, 512)
    points = list(sweep(subject, source, [1, 3], seed=0))
    assert [(point["outpace"]["concurrency"], point["num_requests"]) for point in points] == [(1, 4), (3, 12)]
    assert [point["num_requests"] for point in sweep(subject, source, [1, 3], seed=0, most=2)] == [2, 3]


def test_latency(subject: Subject, steps: list[Step]) -> None:
    found = latency(subject, batch_size=2, input_len=5, output_len=24, iters=2)
    assert len(found["latencies"]) == 2
    assert found["decode_tokens_per_second"] > 0
    ours = found["outpace"]
    assert ours["ratio"] == pytest.approx(found["decode_tokens_per_second"] / ours["limit"]["decode_tokens_per_second"])
    assert ours["ratio_ttft"] == pytest.approx(ours["limit"]["ttft_ms"] / found["median_ttft_ms"])
    prompts = [sequence.num_new_tokens for step in steps for sequence in step.sequences if sequence.request]
    assert prompts == [5, 5] * 8  # (2 warm-ups + 2) of 24 tokens and as many of one


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"input_len": 0}, {"output_len": 1}, {"iters": 0}])
def test_latency_of_nothing(subject: Subject, wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be at least"):
        latency(subject, **wrong)


def test_splitfuse_chops_prompts_and_the_other_way_does_not(subject: Subject, steps: list[Step]) -> None:
    found = splitfuse(subject, EXPERIMENT)
    chunks = [sequence.num_new_tokens for step in steps for sequence in step.sequences if sequence.num_new_tokens > 2]
    assert chunks == [40] * 4 + [4] * 40  # two prompts to warm up and two that count, each way
    for way in (SPLIT, WHOLE):
        assert 0 < found[way]["p50_itl_ms"] <= found[way]["p95_itl_ms"] <= found[way]["p99_itl_ms"]
        rate, seconds = found[way]["total_token_throughput"], found[way]["duration"]
        assert rate * seconds == pytest.approx(2 * 41 + len(found[way]["itls_ms"]))
        assert seconds >= 2 * found["interval"]
    assert found["p95_itl_ratio"] == found[WHOLE]["p95_itl_ms"] / found[SPLIT]["p95_itl_ms"]
    assert subject.llm.engine.scheduler.max_num_batched_tokens == 64


def test_the_experiment_asks_for_what_it_needs() -> None:
    assert Experiment().options() == {"max_num_seqs": 36, "max_num_batched_tokens": 4096, "max_model_len": 2601}
    assert EXPERIMENT.options()["max_num_batched_tokens"] == 64
    with pytest.raises(InputError, match="must be more than the 32 decoders"):
        Experiment(budget=32)
    with pytest.raises(InputError, match="num-prompts: must be at least 1, got 0"):
        Experiment(num_prompts=0)


def test_a_profile_of_decode_steps(subject: Subject) -> None:
    found = profile_decode(subject, small(6), steps=5)
    assert (found["steps"], found["batch_size"], found["gpu_busy"]) == (5, 4, None)
    assert len(found["longest"]) == 10
    times = [entry["us_per_step"] for entry in found["longest"]]
    assert times == sorted(times, reverse=True)
    assert 0 < times[0] < found["step_us"]
    assert found["host_us_per_step"] == pytest.approx(found["step_us"])  # there is nobody to wait for


def test_a_profile_without_room_to_decode(subject: Subject) -> None:
    with pytest.raises(InputError, match="profile: requests end before all of them decode"):
        profile_decode(subject, [Item([3] * 511, 1)], steps=5)


def test_spans_are_counted_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


def test_a_model_without_a_tokenizer_says_so(subject: Subject) -> None:
    with pytest.raises(InputError, match="LlamaForCausalLM has no tokenizer, so its prompts must be token ids"):
        subject.tokenize("hello")


@pytest.mark.parametrize(("others", "said"), [(1.3, True), (0.1, False), (None, False)])
def test_item_15_a_busy_machine_is_told_under_the_table(subject: Subject, others: float | None, said: bool) -> None:
    found = throughput(subject, small(2), concurrency=2)
    measured = found["outpace"]["used_by_other_programs"]
    assert measured is None or 0 <= measured["cores"] <= measured["of"]
    found["outpace"]["used_by_other_programs"] = None if others is None else {"cores": others, "of": 2}
    caption = str(throughput_table(found, "").caption)
    assert ("busy machine: other programs used 1.3 of 2 cores, figures are too low" in caption) == said
