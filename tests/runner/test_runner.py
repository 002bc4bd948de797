"""The runner on a CPU: its limits and pages, its steps, the shapes of graphs, pages in host memory."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace import LLM, ConfigError, SamplingParams
from outpace.cache.host_pages import HostPages
from outpace.cache.kv_cache import Pages, allocate, block_bytes
from outpace.config import LLMConfig
from outpace.runner import budget, start, step_graphs
from outpace.runner import runner as runner_module
from outpace.runner.budget import choose_limits
from outpace.runner.capture import Uncapturable
from outpace.runner.copies import Copies
from outpace.runner.rows import Layout
from outpace.runner.runner import Limits, Ran, Runner
from outpace.runner.start import start_runner
from outpace.runner.step_graphs import CHUNK_SIZES, Shape, StepGraphs, decode_sizes, shapes
from outpace.types import Copy, Pooling, Preemption, Request, ScheduledSequence, Step, Way
from tests.exactness import BLOCK, LONGEST, MOST_NEW, SWAP, assert_same, expected, model, served, watched, work
from tests.models import tiny
from tests.runner.counting import CPU, Counting

GIB = 1 << 30


def entry(name: str, tokens: list[int], blocks: list[int], **changes: Any) -> ScheduledSequence:
    """A request that comes in with all its tokens."""
    request = Request(request_id=name, prompt_token_ids=tuple(tokens), params=SamplingParams(temperature=0))
    given = ScheduledSequence(
        name, 0, len(tokens), True, new_blocks=tuple(blocks), request=request, token_ids=tuple(tokens)
    )
    return replace(given, **changes)


def runner(model: Counting, *, host: int = 0, num_blocks: int = 8) -> tuple[Runner, Pages]:
    pages = allocate(model.kv_heads, num_blocks, model.dtype, CPU, 4)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=20)
    return Runner(model, pages, limits, Copies(host_pages(pages, host)) if host else None), pages


def host_pages(pages: Pages, num_blocks: int) -> HostPages:
    """Host memory for these pages."""
    size = sum(tensor[0].nbytes for tensor in pages.tensors())
    host = HostPages(torch.zeros(num_blocks, size, dtype=torch.uint8), CPU)
    host.bind(pages)
    return host


# steps


def test_a_step_reads_what_the_one_before_chose_without_the_host() -> None:
    made, _ = runner(Counting())
    first = made.launch(Step(0, sequences=[entry("a", [5, 6, 7], [2]), entry("b", [20], [5])]))
    second = made.launch(Step(1, sequences=[ScheduledSequence("a", 3, 1, True), ScheduledSequence("b", 1, 1, True)]))
    third = made.launch(Step(2, sequences=[ScheduledSequence("a", 4, 1, True, new_blocks=(0,))]))
    assert [each().token_ids for each in (first, second, third)] == [{"a": 8, "b": 21}, {"a": 9, "b": 22}, {"a": 10}]
    assert first().step_id == 0


def test_only_those_who_sample_are_in_the_output() -> None:
    made, _ = runner(Counting())
    part = entry("a", [5, 6, 7, 8, 9], [2, 3], num_new_tokens=2, samples=False)
    output = made.launch(Step(0, sequences=[part, entry("b", [20], [5])]))()
    assert output.token_ids == {"b": 21}
    rest = made.launch(Step(1, sequences=[ScheduledSequence("a", 2, 3, True)]))()
    assert rest.token_ids == {"a": 10}


def test_a_step_without_sequences_runs_nothing() -> None:
    counting = Counting()
    made, _ = runner(counting)
    output = made.launch(Step(3))()
    assert (output.step_id, output.token_ids) == (3, {})
    assert counting.batches == []


def test_the_batch_of_a_step() -> None:
    counting = Counting()
    made, pages = runner(counting)
    made.launch(Step(0, sequences=[entry("a", [5, 6, 7, 8, 9], [3, 1]), entry("b", [20], [5])]))
    (batch,) = counting.batches
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 20]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert batch.slots.tolist() == [12, 13, 14, 15, 4, 20]
    assert batch.seq_lens.tolist() == [5, 1]
    assert batch.cu_q.tolist() == [0, 5, 6]
    assert batch.block_table[:, 0].tolist() == [3, 5]
    assert (batch.mixed, batch.max_len) == (True, 20)
    assert pages.keys[0][3, :, 0, 0].tolist() == [5, 6, 7, 8]
    made.launch(Step(1, sequences=[ScheduledSequence("a", 5, 1, True), ScheduledSequence("b", 1, 1, True)]))
    decode = counting.batches[1]
    assert (decode.ids.tolist(), decode.max_q, decode.mixed) == ([10, 21], 1, False)


def test_rows_of_those_who_ended_or_gave_way_are_free_for_others() -> None:
    made, _ = runner(Counting())
    made.launch(Step(0, sequences=[entry(name, [5], [place]) for place, name in enumerate("abcd")]))()
    step = Step(1, ended=["a", "b"], sequences=[entry(name, [7], [place]) for place, name in enumerate("ef")])
    assert made.launch(step)().token_ids == {"e": 8, "f": 8}
    made.reset()
    assert made.launch(Step(0, sequences=[entry(name, [9], [place]) for place, name in enumerate("abcd")]))().token_ids


def test_pages_are_swapped_before_the_step_writes() -> None:
    made, pages = runner(Counting(), host=2)
    made.launch(Step(0, sequences=[entry("a", [5, 6, 7, 8], [0]), entry("b", [9, 10, 11, 12], [1])]))()
    pages.keys[1][1] = 3.5
    store, load = Copy(7, Way.STORE, ((1, 1),)), Copy(8, Way.LOAD, ((1, 4),))
    stored = made.launch(Step(1, copies=[store], after=[7], sequences=[entry("c", [30, 31, 32, 33], [1])]))()
    assert stored.copied == {7: ()}
    assert pages.keys[0][1, :, 0, 0].tolist() == [30, 31, 32, 33]
    going_on = ScheduledSequence("a", 4, 1, True, new_blocks=(2,))
    assert made.launch(Step(2, copied=[7], copies=[load], sequences=[going_on]))().copied == {8: ()}
    assert pages.keys[0][4, :, 0, 0].tolist() == [9, 10, 11, 12]
    assert pages.keys[1][4].eq(3.5).all()
    assert pages.keys[0][2, 0, 0, 0] == 9


def test_logits_after_the_last_token_of_each_piece() -> None:
    made, _ = runner(Counting())
    first = made.run(Step(0, sequences=[entry("a", [5, 6], [0]), entry("b", [20], [1])]))
    assert first.logits.argmax(-1).tolist() == [7, 21]
    piece = ScheduledSequence("a", 2, 2, False, token_ids=(30, 31))
    assert made.run(Step(1, ended=["b"], sequences=[piece])).logits.argmax(-1).tolist() == [32]


def test_a_fresh_prompt_needs_no_pages_for_its_attention() -> None:
    counting = Counting()
    made, _ = runner(counting)
    made.run(Step(0, sequences=[entry("a", [5, 6, 7], [0], num_new_tokens=2, samples=False)]), fresh=True)
    made.run(Step(1, sequences=[ScheduledSequence("a", 2, 1, True)]), fresh=True)
    made.run(Step(2, ended=["a"], sequences=[entry("b", [5, 6], [0]), entry("c", [5, 6], [1])]), fresh=True)
    made.run(Step(3, ended=["b", "c"], sequences=[entry("d", [5, 6], [0])]))
    assert [batch.fresh for batch in counting.batches] == [True, False, False, False]


# limits and pages


def config(**options: Any) -> LLMConfig:
    return LLMConfig(**{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("scheduler", "tokens", "reason"),
    [
        ({}, budget.CPU_TOKENS, "on a CPU larger steps are not faster"),
        ({"max_num_seqs": 600}, 600, "on a CPU larger steps"),
        ({"max_num_batched_tokens": 300}, 300, ""),
    ],
)
def test_the_largest_step_on_a_cpu(
    scheduler: dict[str, Any], tokens: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "outpace"):
        limits = start_runner(Counting(), config(scheduler=scheduler, cache={"num_blocks": 2}), 77).limits
    assert limits == Limits(
        max_num_seqs=scheduler.get("max_num_seqs", 256), max_num_batched_tokens=tokens, max_model_len=77
    )
    assert (f"max_num_batched_tokens: {tokens} (" in caplog.text) == bool(reason)
    assert reason in caplog.text


def chosen_budget(
    times: budget.Times, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int = 64, **scheduler: Any
) -> budget.Budget:
    """What is chosen on a GPU where steps take so long."""
    monkeypatch.setattr(budget, "_time_steps", lambda *_: times)
    gpu = Counting(device=torch.device("cuda"))
    asked = config(scheduler={"max_num_seqs": max_num_seqs, **scheduler})
    return budget.choose_budget(gpu, asked, choose_limits(gpu, asked, 77))


@pytest.mark.parametrize(
    ("took", "least", "tokens", "allowed"),
    [
        (0.0004, 0.0001, 8192, 50),
        (0.02, 0.003, 4096, 50),
        (0.045, 0.007, 2048, 50),  # Llama-3.1-8B on an H200
        (0.05, 0.0, 2048, 50),
        (0.051, 0.01, 1024, 50),
        (0.106, 0.022, 2048, 110),  # Mixtral-8x7B: all experts are read from 8 tokens on
        (0.106, 0.0, 512, 50),  # the same without graphs
        (0.06, 0.016, 2048, 80),  # like Qwen3-30B-A3B
        (0.7, 0.01, 128, 50),
        (0.7, 0.7, 8192, 3500),  # as long for a token as for 2,048
        (9.0, 0.002, 64, 50),
    ],
)
def test_the_largest_streamed_step_on_a_gpu_is_as_large_as_its_time_allows(
    took: float, least: float, tokens: int, allowed: float, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    times = budget.Times(tokens=2048, full=took, each=least)
    with caplog.at_level(logging.INFO, "outpace"):
        chosen = chosen_budget(times, monkeypatch)
    assert (chosen.streamed_tokens, type(chosen.streamed_tokens)) == (tokens, int)
    assert chosen.step_seconds == pytest.approx(allowed / 1e3)
    assert f"{took * 1e3:.1f} ms, a step should take {allowed}" in caplog.text
    assert ("5 times that of a token for each request" in caplog.text) == (allowed > 50)


LLAMA = budget.Times(tokens=2048, full=0.040, quarter=0.0109, each=0.0064, few=0.0045)
"""Llama-3.1-8B on an H200."""


@pytest.mark.parametrize(
    ("times", "tokens", "chunk"),
    [
        (LLAMA, 8192, 384),
        (replace(LLAMA, full=0.045), 8192, 384),
        (replace(LLAMA, few=0.0042), 8192, 384),
        (replace(LLAMA, few=0.0047), 8192, 384),
        (replace(LLAMA, full=0.0369, quarter=0.01006, few=0.0042), 8192, 384),
        (
            replace(LLAMA, each=0.0001, quarter=0.0103, few=0.0043),
            2048,
            384,
        ),  # nothing that larger steps would pay less often
        (replace(LLAMA, each=0.002), 4096, 384),
        (budget.Times(tokens=2048, full=0.005, quarter=0.0016, each=0.001, few=0.00075), 8192, 512),  # 0.6B
        (budget.Times(tokens=2048, full=0.106, quarter=0.043, each=0.022, few=0.020), 8192, 512),  # Mixtral
        (budget.Times(tokens=2048, full=0.3, quarter=0.08, each=0.012, few=0.01), 2048, 64),  # a quarter of 256 tokens
        (budget.Times(tokens=2048, full=0.1, quarter=0.1, each=0.1, few=0.1), 8192, 2048),  # all sizes take as long
        (budget.Times(tokens=2048, full=0.045), 2048, None),  # without graphs
        (replace(LLAMA, affordable=100_000), 8192, 384),
        (replace(LLAMA, affordable=8000), 4096, 384),
        (replace(LLAMA, affordable=700), 2048, 384),
    ],
)
def test_steps_that_nobody_waits_for_give_the_most_tokens_a_second(
    times: budget.Times, tokens: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = chosen_budget(times, monkeypatch)
    assert (chosen.limits.max_num_batched_tokens, chosen.streamed_chunk) == (tokens, chunk)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"max_num_batched_tokens": 4096}, (4096, 4096, 384, None)),
        ({"max_num_batched_tokens": 1024}, (1024, 1024, None, None)),  # a quarter of it is less than 384
        ({"max_num_batched_tokens": 4096, "target_step_ms": 50}, (4096, 2048, 384, 0.05)),
        ({"max_num_batched_tokens": 1024, "target_step_ms": 50}, (1024, 1024, 256, 0.05)),
        ({"target_step_ms": 25}, (8192, 1024, 256, 0.025)),
        ({"target_step_ms": 1e6}, (8192, 8192, 384, 1e3)),
        ({"target_step_ms": 1e-3}, (8192, 64, 16, 1e-6)),
        ({"max_chunk_beside_decodes": 100}, (8192, 2048, None, 0.05)),
        ({"max_chunk_beside_decodes": 100, "max_num_batched_tokens": 4096}, (4096, 4096, None, None)),
    ],
)
def test_what_is_asked_for_is_not_chosen(
    asked: dict[str, Any], expected: tuple[int, int, int | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMConfig, "_problems", lambda self: iter(()))  # there is no GPU here
    found = chosen_budget(LLAMA, monkeypatch, **asked)
    sizes = found.limits.max_num_batched_tokens, found.streamed_tokens, found.streamed_chunk
    assert (*sizes, found.step_seconds) == expected


@pytest.mark.parametrize("captures", [True, False])
def test_steps_are_timed_as_graphs_where_steps_will_be_graphs(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the small ones would take what the host takes to launch them; they are not timed then."""
    graphs: list[Any] = []
    counting = Counting(capturable=captures)

    def seconds(step: Any, device: torch.device) -> float:
        step()
        tokens = len(counting.batches[-1].ids)
        assert counting.batches[-1].slots.tolist() == [0] * tokens, "no token is padding"
        return float(tokens)

    def capture(step: Any, **options: Any) -> Any:
        graphs.append(step)
        return step

    monkeypatch.setattr(budget, "captured", capture)
    monkeypatch.setattr(budget, "_seconds", seconds)
    monkeypatch.setattr(budget, "_affordable", lambda *_: None)
    monkeypatch.setattr(LLMConfig, "cuda_graphs", True)
    asked = config(scheduler={"max_num_seqs": 40, "max_num_batched_tokens": 256})
    found = budget._time_steps(counting, asked, choose_limits(counting, asked, 77))
    expected = budget.Times(tokens=256, full=256, quarter=64, each=40, few=32) if captures else None
    assert found == (expected or budget.Times(tokens=256, full=256))
    assert len(graphs) == (4 if captures else 0)


def test_steps_that_are_timed_do_not_read_the_headers_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are captured before the first is timed. A token for each of 64 requests is more than a quarter of 64."""
    monkeypatch.setattr(budget, "captured", lambda step, **_: step)
    monkeypatch.setattr(budget, "_affordable", lambda *_: None)
    monkeypatch.setattr(budget, "_seconds", lambda step, device: float(len(step())))
    monkeypatch.setattr(LLMConfig, "cuda_graphs", True)
    counting = Counting()
    asked = config(scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64})
    found = budget._time_steps(counting, asked, choose_limits(counting, asked, 77))
    assert (found.full, found.quarter, found.each, found.few) == (64, 16, 64, 32)


PER_BLOCK = block_bytes(Counting().kv_heads, torch.float32, 16)


@pytest.mark.parametrize(
    ("cache", "num_blocks", "reason"),
    [
        ({"num_blocks": 7}, 7, "num_blocks: 7 (asked for)"),
        ({}, 12, "num_blocks: 12 (max_num_seqs requests of max_model_len tokens)"),  # 4 requests of 3 pages each
        ({"cpu_cache_space": 9.5 * PER_BLOCK / GIB}, 9, "num_blocks: 9 (cpu_cache_space="),
        ({"cpu_cache_space": 12 * PER_BLOCK / GIB}, 12, "num_blocks: 12 (max_num_seqs requests"),
    ],
)
def test_how_many_pages_there_are(
    cache: dict[str, Any], num_blocks: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config(cache={"block_size": 16, **cache}, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64})
    with caplog.at_level(logging.INFO, "outpace"):
        started = start_runner(Counting(), asked, 40)
    assert started.num_blocks == num_blocks
    assert reason in caplog.text
    assert started.num_host_blocks == 0
    assert {"memory", "pages", "graphs"} <= set(started.seconds)


def test_no_room_for_a_page() -> None:
    asked = config(cache={"cpu_cache_space": 1e-7})
    with pytest.raises(ConfigError, match=r"cache: no room for a single page of .*cpu_cache_space=1e-07 GiB.*raise"):
        start_runner(Counting(), asked, 40)


def test_host_pages_are_counted_from_the_swap_space() -> None:
    asked = config(cache={"block_size": 16, "num_blocks": 2, "swap_space": 5.9 * PER_BLOCK / GIB})
    assert start_runner(Counting(), asked, 40).num_host_blocks == 5


def test_an_llm_says_what_its_start_took() -> None:
    llm = LLM(tiny("llama"), device="cpu", num_blocks=3)
    assert {"load", "inject", "memory", "pages", "graphs", "all"} <= set(llm.startup_seconds)
    assert sum(llm.startup_seconds.values()) <= 2 * llm.startup_seconds["all"]
    assert llm.engine.scheduler.pool.num_blocks == 3


# pages in host memory


def test_pages_come_back_from_host_memory_as_they_were() -> None:
    pages = allocate([(2, 4, 6), (1, 8, 3)], 6, torch.float32, CPU, 4)
    for tensor in (*pages.keys, *pages.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in (*pages.keys, *pages.values)]
    host = host_pages(pages, 3)
    staging = host.staging()
    host.store([(4, 0), (1, 2)], staging)
    for tensor in (*pages.keys, *pages.values):
        tensor[[1, 4]] = 0
    host.fetch([(0, 1), (2, 5)], staging)
    for tensor, was in zip((*pages.keys, *pages.values), before, strict=True):
        assert torch.equal(tensor[1], was[4])
        assert torch.equal(tensor[5], was[1])
        assert torch.equal(tensor[[0, 2, 3]], was[[0, 2, 3]])


# shapes of graphs


def _run_nothing(shape: Shape) -> tuple[Tensor, Tensor]:
    return torch.tensor([shape.num_tokens]), torch.tensor([shape.num_seqs])


def captured_shapes(patch: pytest.MonkeyPatch, wanted: tuple[Shape, ...]) -> StepGraphs:
    """Graphs that are no graphs: what was recorded is run."""
    patch.setattr(step_graphs, "captured", lambda run, **_: run)
    graphs = StepGraphs(CPU)
    assert all(graphs.capture(shape, _run_nothing) for shape in wanted)
    assert len(graphs) == len(wanted) == len(set(wanted))
    return graphs


@given(st.integers(1, 300), st.integers(0, 3000), st.data())
def test_every_step_runs_in_the_smallest_graph_that_holds_it(num_seqs: int, more: int, data: st.DataObject) -> None:
    max_tokens = num_seqs + more
    wanted = shapes(num_seqs, max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        graphs = captured_shapes(patch, wanted)
    assert all(shape.num_seqs <= num_seqs and shape.num_tokens <= max_tokens for shape in wanted)
    sequences = data.draw(st.integers(1, num_seqs))
    tokens = data.draw(st.integers(sequences, max_tokens))
    found = graphs.fitting(sequences, tokens)
    decode = sequences == tokens
    holding = [
        shape
        for shape in wanted
        if shape.num_seqs >= sequences and shape.num_tokens >= tokens and (shape.kind == "decode") == decode
    ]
    if found is None:
        assert not holding
        assert not decode, "a decode ran without a graph"
        assert tokens > max((size for size in CHUNK_SIZES if size <= max_tokens), default=0)
    else:
        assert found in holding
        assert found.num_tokens == min(shape.num_tokens for shape in holding)
        same = [shape.num_seqs for shape in holding if shape.num_tokens == found.num_tokens]
        assert found.num_seqs == min(same)
        logits, likeliest = graphs.replay(found)
        assert (int(logits), int(likeliest)) == (found.num_tokens, found.num_seqs)


@given(st.integers(1, 1024))
def test_padding_of_decodes_is_small(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_num_seqs)
    for before, size in pairwise(sizes):
        assert size - before <= max(16, before)


def test_the_shape_of_a_step() -> None:
    assert Shape.of(3, 3) == Shape(3, 3, "decode")
    assert Shape.of(1, 9) == Shape(9, 1, "chunks")
    assert Shape.of(2, 9) == Shape(9, 2, "mixed")
    largest, *_, smallest = shapes(16, 64)
    assert (largest, smallest) == (Shape(64, 16, "mixed"), Shape(1, 1, "decode"))


def test_a_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    graphs = captured_shapes(monkeypatch, (Shape(16, 8, "chunks"),))

    def uncapturable(run: Callable[[], Any], **_: Any) -> Any:
        raise Uncapturable("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graphs, "captured", uncapturable)
    monkeypatch.setattr(step_graphs, "mend", lambda device: None)
    assert not graphs.capture(Shape(8, 8, "decode"), _run_nothing)
    assert (len(graphs), graphs.uncapturable) == (0, True)
    assert graphs.fitting(1, 9) is None
    assert "running without graphs (operation not permitted when stream is capturing)" in caplog.text


def like_graphs(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Steps of up to so many tokens run as graphs would."""
    monkeypatch.setattr(start, "_graph_shapes", lambda *_: shapes(12, largest))
    monkeypatch.setattr(start, "_compile", lambda *_: None)
    monkeypatch.setattr(step_graphs, "captured", lambda run, **_: run)


@pytest.mark.parametrize(
    ("family", "pool"),
    [("llama", "roomy"), ("gemma3", "roomy"), ("bloom", "roomy"), ("llama", "swap"), ("gpt2", "small")],
)
def test_steps_that_are_padded_like_graphs_give_the_same_tokens(
    family: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a graph is the function it was made of, so this is padding alone."""
    replayed = list[Shape]()
    replay = StepGraphs.replay

    def noted(graphs: StepGraphs, shape: Shape) -> tuple[Tensor, Tensor]:
        replayed.append(shape)
        return replay(graphs, shape)

    like_graphs(monkeypatch, 64)
    monkeypatch.setattr(StepGraphs, "replay", noted)
    llm = LLM(
        model(family), device="cpu", block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=12,
        num_blocks=300 if pool == "roomy" else -(-(LONGEST + MOST_NEW) // BLOCK),
        swap_space=SWAP if pool == "swap" else 0.0,
    )  # fmt: skip
    with watched(llm.engine) as seen:
        outputs = served(llm.engine, work(LONGEST), seed=3)
    assert_same(outputs, expected(family, LONGEST))
    kinds = {shape.kind for shape in replayed}
    assert kinds == ({"decode", "chunks", "mixed"} if pool == "roomy" else {"decode", "chunks"})
    assert (sum(seen.preempted.values()) > 0) == (pool != "roomy")


def test_steps_larger_than_all_graphs_are_padded_and_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = list[Shape](), list[int]()
    forward, launch = Runner._forward, Runner._run

    def noted(made: Runner, shape: Shape) -> tuple[Tensor, Tensor]:
        run.append(shape)
        return forward(made, shape)

    def counted(made: Runner, layout: Layout, **options: Any) -> Ran:
        seen.append(layout.num_tokens)
        return launch(made, layout, **options)

    like_graphs(monkeypatch, 32)
    monkeypatch.setattr(runner_module, "PADDED", 24)
    llm = LLM(
        model("llama"), device="cpu", block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=12, num_blocks=300
    )
    monkeypatch.setattr(Runner, "_forward", noted)
    monkeypatch.setattr(Runner, "_run", counted)
    assert_same(served(llm.engine, work(LONGEST), seed=3), expected("llama", LONGEST))
    large = {shape for shape in run if shape.num_tokens > 32}
    assert {shape.num_tokens for shape in large} == {48, 64}
    assert any(32 < tokens < 48 for tokens in seen)
    assert {(shape.num_seqs, shape.kind) for shape in large} == {(8, "chunks"), (12, "mixed")}


# vectors of prompts


def pooled(name: str, tokens: list[int], blocks: list[int], pooling: Pooling, **changes: Any) -> ScheduledSequence:
    """A request for a vector that comes in with all its tokens."""
    params = SamplingParams(max_tokens=0)
    request = Request(request_id=name, prompt_token_ids=tuple(tokens), params=params, pooling=pooling)
    return entry(name, tokens, blocks, request=request, **changes)


def test_item_1_vectors_are_gathered_over_the_chunks_of_a_prompt_beside_answers() -> None:
    made, _ = runner(Counting())
    first = pooled("mean", [2, 4, 6], [2], "mean", num_new_tokens=2, samples=False)
    output = made.launch(Step(0, sequences=[first, pooled("last", [3, 8], [4], "last"), entry("text", [5], [5])]))()
    assert output.pooled == {"last": [8.0, 1.0]}
    assert output.token_ids == {"text": 6}
    second = [ScheduledSequence("mean", 2, 1, True), ScheduledSequence("text", 1, 1, True)]
    output = made.launch(Step(1, ended=["last"], sequences=second))()
    assert output.pooled == {"mean": [4.0, 1.0]}
    assert output.token_ids == {"text": 7}


def test_item_1_a_preempted_prompt_goes_on_where_it_was_or_begins_anew() -> None:
    made, _ = runner(Counting(), host=4)
    tokens = [2, 4, 6]
    made.launch(Step(0, sequences=[pooled("swap", tokens, [2], "mean", num_new_tokens=2, samples=False)]))()
    made.launch(Step(1, preempted={"swap": Preemption.SWAP}, copies=[Copy(0, Way.STORE, ((2, 0),))]))()
    back = pooled("swap", tokens, [3], "mean", start=2, num_new_tokens=1)
    made.launch(Step(2, copies=[Copy(1, Way.LOAD, ((0, 3),))]))()
    output = made.launch(Step(3, sequences=[back]))()
    assert output.pooled == {"swap": [4.0, 1.0]}
    made.launch(Step(3, sequences=[pooled("again", tokens, [1], "mean", num_new_tokens=2, samples=False)]))()
    made.launch(Step(4, preempted={"again": Preemption.RECOMPUTE}))()
    assert made.launch(Step(5, sequences=[pooled("again", tokens, [1], "mean")]))().pooled == {"again": [4.0, 1.0]}
