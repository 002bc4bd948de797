"""The runtime on a GPU: graphs change no token, requests give way and come back, memory is given back."""

import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.inject.paged import PagedModel
from outpace.runner import deferred
from outpace.runner.step_graphs import shapes
from outpace.types import Preemption
from tests.exactness import BLOCK, LONGEST, MOST_NEW, SWAP, assert_same, hugging_face, model, served, watched, work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FAMILIES = ("llama", "qwen3", "gemma3")
SMALL = -(-(LONGEST + MOST_NEW) // BLOCK)


def options(**changes: Any) -> dict[str, Any]:
    given = {"device": "cuda", "dtype": "fp32", "block_size": BLOCK, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    return {**given, "num_blocks": 300, **changes}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def answers(family: str) -> list[list[int]]:
    """Of plain Hugging Face on the CPU in fp32, one by one."""
    plain, asked = model(family), work(LONGEST)
    return [hugging_face(plain, *each) for each in zip(asked.prompts, asked.max_tokens, strict=True)]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("pool", ["roomy", "recompute", "swap"])
def test_tokens_are_those_of_hugging_face(
    family: str, answers: list[list[int]], pool: str, eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    num_blocks = 300 if pool == "roomy" else SMALL
    swap_space = SWAP if pool == "swap" else 0.0
    with caplog.at_level(logging.INFO, "outpace"):
        llm = LLM(model(family), **options(num_blocks=num_blocks, swap_space=swap_space, enforce_eager=eager))
    assert ("one for each size of step" in caplog.text) != eager
    with llm, watched(llm.engine) as seen:
        outputs = served(llm.engine, work(LONGEST), seed=5)
    assert_same(outputs, answers)
    kinds = {"roomy": set(), "recompute": {Preemption.RECOMPUTE}, "swap": {Preemption.SWAP}}
    assert set(seen.preempted) == kinds[pool]


def test_graphs_that_follow_behind_the_first_steps(
    family: str, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PACE": 1, "PAYS": 1, "FREE": 0}.items():  # after every step that wants one
        monkeypatch.setattr(deferred, name, value)
    with LLM(model(family), **options(max_num_batched_tokens=256)) as llm:
        runner, left = llm.engine._runner, len(llm.engine._runner.deferred)
        assert_same(served(llm.engine, work(LONGEST), seed=5), answers)
        assert len(runner.deferred) < left
        while llm.engine.is_behind:
            llm.engine.catch_up()
        assert len(runner.graphs) == len(shapes(16, 256))
        assert_same(served(llm.engine, work(LONGEST), seed=6), answers)


def test_steps_of_offline_work_are_larger_than_all_graphs(family: str, answers: list[list[int]]) -> None:
    asked = work(LONGEST)
    params = [SamplingParams(temperature=0, max_tokens=count) for count in asked.max_tokens]
    with LLM(model(family), **options(max_num_batched_tokens=1000, target_step_ms=1e-3)) as llm:
        sizes = llm.engine.scheduler.sizes
        assert (sizes.max_num_batched_tokens, sizes.max_streamed_tokens) == (1000, 16)
        with watched(llm.engine) as seen:
            assert_same(llm.generate(asked.prompts, params, use_tqdm=False), answers)
        assert max(seen.chunks) == LONGEST
        with watched(llm.engine) as seen:
            assert_same(served(llm.engine, asked, seed=7), answers)
        assert max(seen.chunks) <= 16


def test_steps_in_turn_and_ahead_give_the_same(family: str, answers: list[list[int]]) -> None:
    with LLM(model(family), **options(async_scheduling=False)) as llm:
        assert_same(served(llm.engine, work(LONGEST), seed=6), answers)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_prompt_log_probabilities_beside_others(family: str, answers: list[list[int]], eager: bool) -> None:
    """Steps of several headers: none of them may be overwritten on its way."""
    asked = work(LONGEST)
    params = [
        SamplingParams(temperature=0, max_tokens=count, prompt_logprobs=1 if number % 3 == 0 else None)
        for number, count in enumerate(asked.max_tokens)
    ]
    plain = model(family)
    with LLM(model(family), **options(enforce_eager=eager)) as llm:
        outputs = llm.generate(asked.prompts, params, use_tqdm=False)
    assert_same(outputs, answers)
    for output in outputs[::3]:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.no_grad():
            rows = plain(ids).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        for place, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert entry is not None
            token = output.prompt_token_ids[place]
            assert entry[token].logprob == pytest.approx(float(rows[place - 1, token]), abs=2e-3)


def test_seeds_give_the_same_text_with_graphs_and_without() -> None:
    asked = work(LONGEST).prompts[:12]
    params = [SamplingParams(seed=number, max_tokens=16, top_p=0.9) for number in range(len(asked))]
    found = []
    for eager in (False, True):
        with LLM(model("llama"), **options(enforce_eager=eager)) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_memory_is_given_back() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    with LLM(model("llama"), **options()) as llm:  # what libraries keep for good
        llm.generate([5, 6], SamplingParams(max_tokens=3))
    del llm
    before = used()
    llm = LLM(model("llama"), **options(num_blocks=None, gpu_memory_utilization=0.2, max_num_seqs=128))
    llm.generate([[5, 6, 7]] * 9, SamplingParams(max_tokens=9), use_tqdm=False)
    assert torch.cuda.memory_reserved() > before
    llm.shutdown()
    assert used() <= before + (8 << 20)


def test_pages_are_made_of_the_memory_that_is_free() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with LLM(model("llama"), **options(num_blocks=None, gpu_memory_utilization=0.1, max_num_seqs=128)) as llm:
        free, _ = torch.cuda.mem_get_info()
        assert total - free <= 0.12 * total
        assert llm.engine.scheduler.pool.num_blocks > 0


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = PagedModel.forward

    def waits(paged: PagedModel, batch: Any, *more: Any) -> Tensor:
        assert int(batch.cu_q[-1]) >= 0  # the host waits for the device, which no graph can
        return forward(paged, batch, *more)

    monkeypatch.setattr(PagedModel, "forward", waits)
    asked, plain = work(LONGEST), model("llama")
    with LLM(model("llama"), **options()) as llm:
        outputs = served(llm.engine, asked.only(range(8)), seed=7)
    assert "a step cannot be captured, running without graphs" in caplog.text
    assert_same(outputs, [hugging_face(plain, asked.prompts[n], asked.max_tokens[n]) for n in range(8)])


def test_an_error_in_a_step_leaves_a_working_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model("llama")
    with LLM(model("llama"), **options(enforce_eager=True)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(PagedModel, "forward", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0), use_tqdm=False)
        (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8))
    assert output.outputs[0].token_ids == hugging_face(plain, [5, 6, 7], 8)
