"""Vectors of prompts through the scheduler: those of plain Hugging Face, whatever the chunks and whoever is beside."""

from typing import Any

import pytest
import torch

from outpace import LLM, InputError, NotSupported, SamplingParams
from outpace.types import Pooling
from tests.exactness import LEVEL_0, model
from tests.models import tiny

OPTIONS: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "max_num_seqs": 4, "block_size": 16}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7], [1] * 40, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
FAMILIES = ("llama", "qwen3", "gpt2", "opt", "bloom", "gpt_neox", "gemma3", "mixtral", LEVEL_0)


def made(family: str) -> Any:
    return model(family) if family == LEVEL_0 else tiny(family)


def expected(family: str, pooling: Pooling) -> list[torch.Tensor]:
    module = made(family).eval()
    with torch.no_grad():
        states = [module.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    return [hidden.mean(0) if pooling == "mean" else hidden[-1] for hidden in states]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_item_1_vectors_are_those_of_hugging_face(family: str, pooling: Pooling) -> None:
    llm = LLM(made(family), max_num_batched_tokens=7, **OPTIONS)
    for _ in range(2):  # the second time prefixes are cached
        found = llm.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
        for output, right in zip(found, expected(family, pooling), strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_item_1_vectors_survive_preemption_and_answers_beside_them_do_not_change(swap_space: float) -> None:
    """All slots are taken by half computed prompts of one caller; that of another takes one, by recompute or swap."""
    llm = LLM(tiny("llama"), max_num_batched_tokens=8, swap_space=swap_space, **OPTIONS)
    engine, nothing = llm.engine, SamplingParams(max_tokens=0)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    answer = engine.add_request("answer", [5, 6, 7], params)
    longest = [PROMPTS[2]] * 3
    vectors = [engine.add_request(f"v{n}", ids, nothing, pooling="mean") for n, ids in enumerate(longest)]
    for _ in range(6):
        engine.step()
    assert engine.scheduler.num_running == 4
    vectors.append(engine.add_request("other", PROMPTS[3], nothing, pooling="mean", caller="other"))
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.totals.preemptions == 1
    assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
    right = expected("llama", "mean")
    for output, vector in zip(vectors, [*[right[2]] * 3, right[3]], strict=True):
        torch.testing.assert_close(torch.tensor(output.pooled), vector, rtol=1e-3, atol=1e-4)


def test_item_1_a_long_prompt_is_chopped_and_answers_go_on_beside_it() -> None:
    """A token for the answer in every step that computes the prompt, as with any other prompt."""
    llm = LLM(tiny("llama"), max_num_batched_tokens=8, **OPTIONS)
    engine, chunk = llm.engine, llm.engine.scheduler.max_chunk_beside_decodes
    answer = engine.add_request("answer", [5, 6], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    engine.step()
    vector = engine.add_request("vector", [1] * 24, SamplingParams(max_tokens=0), pooling="mean")
    steps = 0
    while vector.pooled is None:
        before = answer.num_tokens
        engine.step()
        assert answer.num_tokens == before + 1
        steps += 1
    assert steps == -(-24 // chunk)


def test_item_1_a_vector_can_be_cancelled_between_its_chunks() -> None:
    llm = LLM(tiny("llama"), max_num_batched_tokens=4, **OPTIONS)
    engine = llm.engine
    vector = engine.add_request("vector", [1] * 24, SamplingParams(max_tokens=0), pooling="mean")
    engine.step()
    assert engine.abort("vector")
    assert vector.finished
    engine.step()
    assert not engine.has_unfinished_requests
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_vectors_have_length_1_unless_told_otherwise() -> None:
    llm = LLM(tiny("llama"), **OPTIONS)
    (unit,) = llm.embed([1, 2, 3])
    (plain,) = llm.embed([1, 2, 3], normalize=False)
    assert sum(value**2 for value in unit.outputs.embedding) == pytest.approx(1)
    ratio = plain.outputs.embedding[0] / unit.outputs.embedding[0]
    assert unit.outputs.embedding == pytest.approx([value / ratio for value in plain.outputs.embedding])


def test_wrong_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny("llama"), max_model_len=16, **OPTIONS)
    llm.embed([1] * 16)  # there is no answer to leave room for
    with pytest.raises(InputError, match="max_model_len=16"):
        llm.embed([1] * 17)
    with pytest.raises(InputError, match="pooling: expected one of mean, last"):
        llm.embed([1], pooling="max")  # type: ignore[arg-type]
    for wrong in ({"weight": 0.0}, {"weight": "2"}, {"pooling": "max"}, {"caller": 3}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}: expected"):
            llm.engine.add_request("wrong", [1], **wrong)
    monkeypatch.setattr(llm.engine._parts.model, "gives_hidden", False)
    with pytest.raises(NotSupported, match="hidden states"):
        llm.embed([1])


@pytest.mark.parametrize("n", [1, 3])
def test_item_24_no_tokens_and_log_probabilities_of_the_prompt(n: int) -> None:
    """What scoring asks for: the same numbers as with an answer, and no answer."""
    llm = LLM(tiny("llama"), max_num_batched_tokens=8, **OPTIONS)
    (with_answer,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    (scored,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=0, prompt_logprobs=2, n=n), use_tqdm=False)
    assert scored.prompt_logprobs == with_answer.prompt_logprobs
    assert [(output.token_ids, output.finish_reason) for output in scored.outputs] == [([], "length")] * n


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", ["llama", "gpt2", LEVEL_0])
def test_item_1_vectors_on_a_gpu_beside_answers_from_graphs(family: str) -> None:
    llm = LLM(made(family), max_num_batched_tokens=16, **{**OPTIONS, "device": "cuda"})
    engine, nothing = llm.engine, SamplingParams(max_tokens=0)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    answer = engine.add_request("answer", [5, 6, 7], params)
    vectors = [engine.add_request(f"v{n}", ids, nothing, pooling="mean") for n, ids in enumerate(PROMPTS)]
    while engine.has_unfinished_requests:
        engine.step()
    assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
    for output, right in zip(vectors, expected(family, "mean"), strict=True):
        torch.testing.assert_close(torch.tensor(output.pooled), right, rtol=1e-2, atol=1e-3)
