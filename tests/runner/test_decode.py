"""The loop of `engine.generate` over pages: the same tokens as Hugging Face, and what is kept between calls."""

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

import outpace
from outpace.cache.kv_cache import Pages, allocate
from outpace.inject.paged import PagedModel
from outpace.runner import decode, step_graphs
from outpace.runner.capture import Uncapturable
from outpace.runner.decode import PagedDecoder
from outpace.runner.sequences import CHECK_EVERY
from outpace.runner.step_graphs import Shape, StepGraphs
from tests.inject.checks import injected_copy, padded_prompts, randomised
from tests.models import VOCAB, tiny

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "opt", "bloom", "gpt_neox", "mixtral")
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "processors": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
}


def prompt(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def loops(model: Any, **options: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Hugging Face's own generate, and the paged loop behind the same call."""
    fused: Any
    fused, injected = injected_copy(model)
    loop = PagedDecoder(PagedModel(fused, injected, 64), 64, **{"graphs": False, **options})

    def seeded(generate: Callable[..., Tensor], *args: Any, **call: Any) -> Tensor:
        torch.manual_seed(5)
        return generate(*args, **call)

    paged = functools.partial(fused.generate, custom_generate=functools.partial(loop, streamer=None))
    return functools.partial(seeded, model.generate), functools.partial(seeded, paged)


@pytest.fixture(scope="module")
def model() -> Any:
    return randomised(tiny("llama"))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Shapes in the order of their captures. On a CPU a graph is the function it was made of."""
    seen: list[Shape] = []
    capture = StepGraphs.capture

    def noted(graphs: StepGraphs, shape: Shape, run: Any, **options: Any) -> bool:
        seen.append(shape)
        return capture(graphs, shape, run)

    monkeypatch.setattr(StepGraphs, "capture", noted)
    monkeypatch.setattr(step_graphs, "captured", lambda run, **_: run)
    monkeypatch.setattr(step_graphs, "mend", lambda device: None)
    return seen


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_every_family(family: str, call: str) -> None:
    plain, fused = (randomised(tiny(family)) for _ in range(2))
    engine = outpace.init_inference(fused, kernel_inject=True)
    inputs, reference = padded_prompts(VOCAB), outpace.init_inference(plain)
    expected, found = (
        each.generate(**inputs, **CALLS[call], max_new_tokens=24, seed=7) for each in (reference, engine)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("step_tokens", [1, 3, 7, 16])
def test_prompts_longer_than_a_step_run_in_chunks(model: Any, step_tokens: int, call: str) -> None:
    own, paged = loops(model, step_tokens=step_tokens)
    alone: dict[str, Tensor] = {"input_ids": prompt(1, 20)}
    for inputs in (alone, padded_prompts(VOCAB)):
        options = {**inputs, **CALLS[call], "max_new_tokens": 12}
        assert torch.equal(paged(**options), own(**options))


@pytest.mark.parametrize("call", CALLS)
def test_steps_that_are_padded_like_graphs(model: Any, captures: list[Shape], call: str) -> None:
    own, paged = loops(model, graphs=True, step_tokens=40)
    for inputs in ({"input_ids": prompt(1, 45)}, padded_prompts(VOCAB), {"input_ids": prompt(1, 1)}):
        options = {**inputs, **CALLS[call], "max_new_tokens": 12}
        assert torch.equal(paged(**options), own(**options))
    assert {shape.kind for shape in captures} == {"fresh", "chunks", "decode"}


def test_calls_that_alternate_between_batch_sizes_capture_nothing_anew(model: Any, captures: list[Shape]) -> None:
    own, paged = loops(model, graphs=True)
    for turn in range(3):
        for rows, length in ((8, 4), (1, 9), (3, 5), (2, 30)):
            ids = prompt(rows, length, seed=turn)
            call = {"input_ids": ids, "max_new_tokens": 4, "do_sample": False}
            assert torch.equal(paged(**call), own(**call))
        if turn == 0:
            first = list(captures)
    assert captures == first
    assert {shape.num_seqs for shape in first if shape.kind == "decode"} == {1, 2, 4, 8}


def test_pages_come_with_the_first_call_and_grow_only_when_they_must(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, list[weakref.ref[Tensor]]]] = []

    def noted(heads: Any, num_blocks: int, *rest: Any) -> Pages:
        assert all(ref() is None for _, refs in made for ref in refs), "old pages are freed before new ones are made"
        pages = allocate(heads, num_blocks, *rest)
        made.append((num_blocks, [weakref.ref(tensor) for tensor in (*pages.keys, *pages.values)]))
        return pages

    monkeypatch.setattr(decode, "allocate", noted)
    monkeypatch.setattr(decode, "ROOM", 16)
    own, paged = loops(model)
    assert made == []
    sizes = []
    for rows, length, new in ((1, 5, 3), (1, 9, 3), (9, 5, 3), (2, 30, 8), (1, 5, 3), (9, 9, 3), (11, 20, 20)):
        call = {"input_ids": prompt(rows, length), "max_new_tokens": new, "do_sample": False}
        assert torch.equal(paged(**call), own(**call)), (rows, length, new)
        sizes.append(len(made))
    assert sizes == [1, 1, 2, 3, 3, 3, 4]
    counts = [count for count, _ in made]
    assert counts == sorted(counts)


def test_a_step_that_cannot_be_captured_is_said_once(
    model: Any, captures: list[Shape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(run: Any, **_: Any) -> Any:
        raise Uncapturable("operation not permitted")

    monkeypatch.setattr(step_graphs, "captured", fails)
    own, paged = loops(model, graphs=True)
    for rows in (1, 2, 12, 1):  # twelve sequences make a larger runner
        call = {"input_ids": prompt(rows, 6), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(paged(**call), own(**call))
    assert len(captures) == 1
    assert caplog.text.count("running without graphs (operation not permitted)") == 1


def test_a_model_that_cannot_be_captured_is_not_tried(model: Any, captures: list[Shape]) -> None:
    fused: Any
    fused, injected = injected_copy(model)
    paged = PagedModel(fused, injected, 64)
    paged.capturable = False
    PagedDecoder(paged, 64, graphs=True).greedy(prompt(2, 4), None, 9, [], None)
    assert captures == []


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma3", 2)])
def test_a_sketch_has_the_first_layer_of_each_kind(family: str, kinds: int) -> None:
    """Kernels are found with it at the start; gemma3 has layers with a window and layers without."""
    changes: dict[str, Any] = {"num_hidden_layers": 4}
    if family == "gemma3":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    fused: Any
    fused, injected = injected_copy(tiny(family, **changes))
    paged = PagedModel(fused, injected, 64)
    sketch = paged.sketch()
    assert len(sketch._layers) == len(sketch.kv_heads) == kinds
    assert [*sketch._layers] == [*paged._layers[:kinds]]
    assert len(paged._layers) == 4


class _Fails(LogitsProcessor):
    def __init__(self, error: BaseException, after: int) -> None:
        self._error, self._left = error, after

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return scores


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", [0, 3])
def test_an_error_in_a_processor_leaves_a_working_loop(error: BaseException, after: int) -> None:
    plain: Any = randomised(tiny("llama"))
    engine = outpace.init_inference(randomised(tiny("llama")), kernel_inject=True)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    for rows in (3, 8):  # every row that there is
        with pytest.raises(type(error)):
            engine.generate(prompt(rows, 6), logits_processor=LogitsProcessorList([_Fails(error, after)]), **options)
        assert torch.equal(engine.generate(prompt(rows, 6), **options), plain.generate(prompt(rows, 6), **options))


def test_an_error_in_the_model_leaves_a_working_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = randomised(tiny("llama"))
    engine = outpace.init_inference(randomised(tiny("llama")), kernel_inject=True)
    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "forward", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompt(2, 6), max_new_tokens=4, do_sample=False)
    found = engine.generate(prompt(2, 6), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, plain.generate(prompt(2, 6), max_new_tokens=4, do_sample=False))


def test_ended_sequences_are_looked_for_every_few_steps() -> None:
    engine = outpace.init_inference(randomised(tiny("llama")), kernel_inject=True)
    ids, options = prompt(2, 6), {"max_new_tokens": 50, "do_sample": False}
    first = engine.generate(ids, **options)[:, 6].tolist()
    engine.profile_model_time()
    found = engine.generate(ids, **options, eos_token_id=first, pad_token_id=1)
    assert found.shape == (2, 7)
    assert len(engine.model_times()) == CHECK_EVERY


class _After(StoppingCriteria):
    """Ends the first sequence at some length, and others later."""

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        ends = torch.arange(input_ids.shape[0]) * 3 + 9
        return input_ids.shape[1] >= ends


@pytest.mark.parametrize(
    "criteria",
    [
        [EosTokenCriteria(list(range(5, 60)))],
        [MaxLengthCriteria(11)],
        [MaxLengthCriteria(3)],
        [_After()],
        [_After(), EosTokenCriteria(list(range(40, 60)))],
    ],
    ids=["ends", "length", "shorter than the prompt", "own", "own and ends"],
)
@pytest.mark.parametrize("sample", [False, True])
def test_criteria_of_the_caller(model: Any, criteria: list[StoppingCriteria], sample: bool) -> None:
    own, paged = loops(model)
    call: dict[str, Any] = {"max_new_tokens": 40, "do_sample": sample, "pad_token_id": 1}
    ended = StoppingCriteriaList(criteria)
    expected, found = (each(prompt(3, 6), stopping_criteria=ended, **call) for each in (own, paged))
    assert torch.equal(found, expected)
    assert found.shape[1] < 46


def test_processors_of_the_caller_see_every_token(model: Any) -> None:
    own, paged = loops(model)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    call = {**padded_prompts(VOCAB), "max_new_tokens": 30, "do_sample": False, "logits_processor": processors}
    assert torch.equal(paged(**call), own(**call))


class _Flattens(LogitsProcessor):
    """Reads the ids in a way that only a contiguous tensor allows."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.index_fill(1, input_ids.view(-1), -1e9)


def test_processors_of_the_caller_get_contiguous_ids(model: Any) -> None:
    own, paged = loops(model)
    call = {"max_new_tokens": 8, "do_sample": False, "logits_processor": LogitsProcessorList([_Flattens()])}
    assert torch.equal(paged(prompt(3, 6), **call), own(prompt(3, 6), **call))


@pytest.mark.parametrize("pad", [VOCAB, -1], ids=["after the vocabulary", "negative"])
def test_padding_after_an_end_is_never_an_input(model: Any, pad: int) -> None:
    """Many tokenizers have a pad token that the model does not embed."""
    _, paged = loops(model)
    call = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": list(range(5, 40))}
    found, expected = (paged(prompt(4, 6), pad_token_id=token, **call) for token in (pad, 0))
    assert (expected[:, 6:] == 0).any()
    assert torch.equal(found.where(found != pad, 0), expected)


@pytest.mark.parametrize("sample", [False, True])
def test_calls_with_and_without_inference_mode(sample: bool) -> None:
    plain: Any = randomised(tiny("llama"))
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": sample}
    engine = outpace.init_inference(randomised(tiny("llama")), kernel_inject=True)
    for inference, rows in ((True, 2), (False, 2), (True, 9), (False, 9)):  # nine sequences make a larger runner
        torch.manual_seed(5)
        expected = plain.generate(prompt(rows, 6), **call)
        with torch.inference_mode(inference):
            torch.manual_seed(5)
            assert torch.equal(engine.generate(prompt(rows, 6), **call), expected)


def test_ids_keep_their_dtype(model: Any) -> None:
    fused: Any
    fused, injected = injected_copy(model)
    loop = PagedDecoder(PagedModel(fused, injected, 64), 64, graphs=False)
    ids = prompt(2, 5)
    expected = loop.greedy(ids, None, 20, [7, 9], 1)
    found = loop.greedy(ids.int(), None, 20, [7, 9], 1)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), expected)


def test_destroy_frees_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def noted(*args: Any) -> Pages:
        pages = allocate(*args)
        kept.extend(weakref.ref(tensor) for tensor in (*pages.keys, *pages.values))
        return pages

    monkeypatch.setattr(decode, "allocate", noted)
    engine = outpace.init_inference(tiny("llama"), kernel_inject=True)
    engine.generate(prompt(2, 5), max_new_tokens=4, do_sample=False)
    assert kept
    assert all(ref() is not None for ref in kept)
    engine.destroy()
    assert all(ref() is None for ref in kept)


def test_the_log_says_nothing_of_pages_while_they_work(caplog: pytest.LogCaptureFixture) -> None:
    engine = outpace.init_inference(tiny("llama"), kernel_inject=True)
    with caplog.at_level(logging.INFO, logger="outpace"):
        engine.generate(prompt(2, 5), max_new_tokens=4, do_sample=True)
    assert "Hugging Face's loop" not in caplog.text
