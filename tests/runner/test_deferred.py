"""Graphs that are captured behind the first steps. On a CPU a graph is the function that it was made of."""

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace import LLM
from outpace.config import LLMConfig
from outpace.llm_engine import LLMEngine
from outpace.load_paged import load_paged
from outpace.runner import deferred, start, step_graphs
from outpace.runner.capture import Uncapturable
from outpace.runner.deferred import FREE, PACE, PAYS, Deferred, first_shapes
from outpace.runner.runner import Limits
from outpace.runner.step_graphs import Shape, StepGraphs, shapes, smallest
from outpace.server.channel import Channel
from outpace.server.engine import EngineRequest
from outpace.server.messages import add, frame
from outpace.server.worker import Worker
from outpace.types import SamplingParams
from tests.exactness import BLOCK, LONGEST, assert_same, expected, model, served, work
from tests.models import tiny
from tests.runner.counting import Counting

SEQS, TOKENS = 12, 128
WANTED = shapes(SEQS, TOKENS)
LATER = [shape for shape in WANTED if shape not in first_shapes(WANTED)]


@given(st.integers(1, 1100), st.integers(0, 9000), st.data())
def test_every_step_has_a_graph_from_the_start(num_seqs: int, more: int, data: st.DataObject) -> None:
    wanted = shapes(num_seqs, num_seqs + more)
    first = first_shapes(wanted)
    assert [shape for shape in wanted if shape in first] == list(first), "the largest first, as graphs share memory"
    assert {shape.kind for shape in first} == {shape.kind for shape in wanted}
    sequences = data.draw(st.integers(1, num_seqs))
    tokens = data.draw(st.integers(sequences, num_seqs + more))
    best, found = smallest(wanted, sequences, tokens), smallest(first, sequences, tokens)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert found.num_tokens <= max(64, 2 * tokens), "no step is padded to more than twice its size"


def test_most_graphs_are_captured_later() -> None:
    for tokens in 2048, 8192:
        assert 2 * len(first_shapes(shapes(256, tokens))) < len(shapes(256, tokens))


STEPS = st.tuples(st.integers(1, SEQS), st.integers(0, TOKENS - SEQS)).map(lambda step: (step[0], sum(step)))


@given(st.lists(STEPS, max_size=300))
def test_while_requests_are_answered_a_graph_comes_when_its_want_has_cost_as_much(steps: list[tuple[int, int]]) -> None:
    left, first, since = Deferred(LATER), list(first_shapes(WANTED)), 0
    paid = dict.fromkeys(LATER, 0)
    for num_seqs, num_tokens in steps:
        found, wanted = (smallest(given, num_seqs, num_tokens) for given in (first, paid))
        assert found is not None
        left.note(num_seqs, num_tokens, found)
        since += 1
        if wanted is not None:
            paid[wanted] += max(0, max(found.num_tokens, FREE) - max(wanted.num_tokens, FREE))
        due = left.due()
        assert (due is None) == (since < PACE or max(paid.values()) < PAYS)
        if due is not None:
            assert paid.pop(due) >= PAYS
            left.done(due)
            first.append(due)
            since = 0


@given(st.lists(STEPS, max_size=60))
def test_while_there_is_nothing_to_do_all_graphs_come_the_most_wanted_first(steps: list[tuple[int, int]]) -> None:
    left, first = Deferred(LATER), first_shapes(WANTED)
    for num_seqs, num_tokens in steps:
        left.note(num_seqs, num_tokens, smallest(first, num_seqs, num_tokens))
    came = list[Shape]()
    while (shape := left.next()) is not None:
        left.done(shape)
        came.append(shape)
    assert sorted(came, key=repr) == sorted(LATER, key=repr)
    assert len(left) == 0
    if not steps:
        assert came == LATER


def test_what_takes_too_long_is_left_for_when_nobody_waits() -> None:
    left, shape = Deferred(LATER), LATER[0]
    for _ in range(max(PACE, PAYS)):
        left.note(shape.num_seqs, shape.num_tokens, WANTED[0])
    assert left.due() == left.next() == shape
    left.leave_for_later(shape)
    assert left.due() is None
    for _ in range(PACE):
        left.note(1, 1, None)
    assert left.due() is None
    assert left.next() == shape


# with a model


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes that are captured, as they come; steps want those of 12 sequences and 128 tokens."""
    seen: list[Shape] = []
    captured = StepGraphs._captured

    def noted(graphs: StepGraphs, shape: Shape, run: Any, **options: Any) -> Any:
        seen.append(shape)
        return captured(graphs, shape, run, **options)

    monkeypatch.setattr(start, "_graph_shapes", lambda *_: WANTED)
    monkeypatch.setattr(start, "_compile", lambda *_: None)
    monkeypatch.setattr(step_graphs, "captured", lambda run, **_: run)
    monkeypatch.setattr(step_graphs, "mend", lambda device: None)
    monkeypatch.setattr(StepGraphs, "_captured", noted)
    return seen


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step may be followed by a capture."""
    monkeypatch.setattr(deferred, "PACE", 1)
    monkeypatch.setattr(deferred, "PAYS", 1)
    monkeypatch.setattr(deferred, "FREE", 0)


def started(family: str = "llama", **options: Any) -> LLMEngine:
    sizes: dict[str, Any] = {"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQS, "num_blocks": 300}
    return LLM(model(family), device="cpu", block_size=BLOCK, **sizes, **options).engine


def refuse_others(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after_a_run: bool = False) -> None:
    """From now on captures fail, or only those without a run before."""

    def fails(run: Callable[[], Any], *, warm_ups: int, **_: Any) -> Any:
        if warm_ups and after_a_run:
            return run
        raise error

    monkeypatch.setattr(step_graphs, "captured", fails)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("ahead", [True, False])
def test_answers_do_not_depend_on_which_graphs_are_there(captures: list[Shape], ahead: bool) -> None:
    engine = started(async_scheduling=ahead)
    assert captures == list(first_shapes(WANTED))
    outputs = served(engine, work(LONGEST), seed=3)
    assert_same(outputs, expected("llama", LONGEST))
    assert len(captures) > len(first_shapes(WANTED)), "no step wanted another graph"
    while engine.is_behind:
        engine.catch_up()
    assert sorted(captures, key=repr) == sorted(WANTED, key=repr)
    engine.catch_up()
    assert len(captures) == len(WANTED)
    assert_same(served(engine, work(LONGEST), seed=4), expected("llama", LONGEST))


@pytest.mark.parametrize("error", [Uncapturable("no memory"), RuntimeError("no memory")])
def test_a_capture_that_fails_while_nobody_waits(
    error: Exception, captures: list[Shape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started()
    graphs = engine._runner.graphs
    refuse_others(monkeypatch, error)
    engine.catch_up()
    assert not engine.is_behind
    assert (len(graphs), graphs.uncapturable) == (len(first_shapes(WANTED)), False)
    assert f"{LATER[0]} and those after it are not captured (no memory)" in caplog.text
    assert_same(served(engine, work(LONGEST), seed=3), expected("llama", LONGEST))


@pytest.mark.usefixtures("hurried")
def test_a_capture_that_fails_between_steps_is_left_for_later(
    captures: list[Shape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started()
    refuse_others(monkeypatch, Uncapturable("a kernel is new"), after_a_run=True)
    assert_same(served(engine, work(LONGEST), seed=3), expected("llama", LONGEST))
    assert len(captures) > len(first_shapes(WANTED)), "none was tried"
    assert len(engine._runner.graphs) == len(first_shapes(WANTED))
    while engine.is_behind:  # after a run
        engine.catch_up()
    assert len(engine._runner.graphs) == len(WANTED)
    assert "not captured" not in caplog.text


@pytest.mark.parametrize("why", ["ranks", "streaming"])
def test_what_other_ranks_have_to_capture_too_is_captured_at_the_start(
    why: str, captures: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would not know when: this rank alone sees when there is nothing to do."""
    counting: Any = Counting()
    if why == "ranks":
        monkeypatch.setattr(start, "everyone", lambda _: SimpleNamespace(size=2, least=lambda number, _: number))
    else:
        counting.streaming = SimpleNamespace(restore=lambda: None)
    sizes = {"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQS}
    config = LLMConfig(device="cpu", scheduler=sizes, cache={"num_blocks": 2})
    runner = start.start_runner(counting, config, 40).runner
    assert captures == list(WANTED)
    assert not runner.deferred
    runner.catch_up(idle=True)
    assert captures == list(WANTED)


def test_nothing_is_deferred_where_nothing_can_be_captured(
    captures: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_others(monkeypatch, Uncapturable("not on this device"))
    engine = started()
    assert not engine.is_behind
    assert engine._runner.graphs.uncapturable


def test_a_capture_between_steps_leaves_the_step_on_its_way_alone(
    captures: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run before the capture sees a step without tokens, and what the step before chose stays."""
    engine = started()
    seen: list[Tensor] = []

    def warm(run: Callable[[], Any], *, warm_ups: int, **_: Any) -> Any:
        if not warm_ups:
            raise Uncapturable("a kernel is new")
        seen.append(run()[0])
        return run

    monkeypatch.setattr(step_graphs, "captured", warm)

    def answer(name: str, between: Callable[[], None]) -> list[int]:
        output = engine.add_request(name, list(range(3, 40)), SamplingParams(temperature=0, max_tokens=20))
        while engine.has_unfinished_requests:
            engine.step()
            between()
        return output.outputs[0].token_ids

    assert answer("alone", lambda: None) == answer("beside", engine.catch_up)
    assert len(seen) == len(LATER)


# the engine process


def test_the_engine_process_captures_while_nobody_asks(captures: list[Shape]) -> None:
    sizes = {"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQS, "num_blocks": 64, "block_size": BLOCK}
    parts = load_paged(tiny("llama"), LLMConfig(device="cpu", **sizes), tokenizer=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = Worker(LLMEngine(parts), parts, Channel(theirs))
        process.turn()  # does not sleep
        assert len(captures) == len(first_shapes(WANTED)) + 1
        params = SamplingParams(temperature=0, max_tokens=4)
        ours.sendall(frame(add(1, EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7], params=params))))
        process.turn()
        while process._unsent.live:
            process.turn()
        assert len(captures) == len(first_shapes(WANTED)) + 1, "a request waited for a capture"
        for _ in LATER[1:]:
            process.turn()
        assert sorted(captures, key=repr) == sorted(WANTED, key=repr)
        assert not process._engine.is_behind


# kernels


def test_every_shape_runs_once_before_it_is_captured_and_the_processes_know_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that only some sizes launch would otherwise be compiled when these are captured, alone."""
    looked, sampled, tuned = list[int](), list[int](), list[Shape]()
    counting = Counting()

    def compile_ahead(steps: Any, meanwhile: Callable[[], None]) -> float:
        for step in steps:
            step()
            looked.append(len(counting.batches[-1].ids))
        meanwhile()
        counting.batches.clear()
        return 0.0

    monkeypatch.setattr(start, "_graph_shapes", lambda _, __, limits: shapes(SEQS, limits.max_num_batched_tokens))
    monkeypatch.setattr(start, "compile_ahead", compile_ahead)
    monkeypatch.setattr(start, "_sample_once", lambda logits, params: sampled.append(len(logits)))
    monkeypatch.setattr(start, "tune_products", lambda model, runner, wanted: tuned.extend(wanted))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    seconds: dict[str, float] = {}
    limits = Limits(max_num_seqs=SEQS, max_num_batched_tokens=64, max_model_len=40)
    start._compile(counting, LLMConfig(device="cpu"), limits, seconds)
    every = shapes(SEQS, counting.max_tokens)  # the tokens of a step are not chosen yet
    assert sorted(looked) == sorted(len(batch.ids) for batch in counting.batches) == sorted(s.num_tokens for s in every)
    assert looked[:2] == [counting.max_tokens, 1], "long kernels first, and what most kernels are in"
    assert len(sampled) == 2 * len(start.SAMPLED)
    assert tuned == list(every)
    assert set(seconds) == {"kernels found", "products", "kernels compiled", "kernels loaded"}
