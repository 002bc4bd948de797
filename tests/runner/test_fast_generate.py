"""generate of an injected engine: over pages or through Hugging Face's loop, and the same tokens always."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor, Phi3Config, Phi3ForCausalLM
from transformers.generation.streamers import BaseStreamer

import outpace
from outpace import InferenceEngine
from outpace.runner import fast_generate
from outpace.runner.decode import PagedDecoder
from tests.inject.checks import randomised
from tests.models import tiny

PROMPTS = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(PROMPTS)
MASK[1, :4] = 0
MASK[2, :1] = 0


@pytest.fixture(scope="module")
def engines() -> tuple[InferenceEngine, InferenceEngine]:
    """A plain engine and an injected one with the same weights."""
    plain, fused = (randomised(tiny("llama")) for _ in range(2))
    return outpace.init_inference(plain), outpace.init_inference(fused, kernel_inject=True)


def both(engines: tuple[InferenceEngine, InferenceEngine], **options: Any) -> list[Any]:
    results = []
    for engine in engines:
        torch.manual_seed(11)
        results.append(engine.generate(PROMPTS, **{"attention_mask": MASK, "max_new_tokens": 20, **options}))
    return results


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy by length": {"do_sample": False, "max_new_tokens": None, "max_length": 25},
    "greedy, given config": {"generation_config": GenerationConfig(max_new_tokens=12, do_sample=False)},
    "no end": {"do_sample": False, "eos_token_id": None},
    "several ends": {"do_sample": False, "eos_token_id": list(range(5, 60)), "pad_token_id": 0},
    "one of the ends": {"do_sample": False, "eos_token_id": 7, "pad_token_id": 1},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.4},
    "no repeats": {"do_sample": False, "no_repeat_ngram_size": 2},
    "least length": {"do_sample": False, "min_new_tokens": 6},
    "processor": {"do_sample": False, "logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(16, 2)])},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "no cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_same_tokens(engines: tuple[InferenceEngine, InferenceEngine], call: str) -> None:
    expected, found = both(engines, **CALLS[call])
    assert torch.equal(expected, found)


def test_the_same_with_scores(engines: tuple[InferenceEngine, InferenceEngine]) -> None:
    expected, found = both(engines, do_sample=False, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(expected.sequences, found.sequences)
    torch.testing.assert_close(torch.stack(expected.scores), torch.stack(found.scores), rtol=1e-4, atol=1e-4)


def test_padding_that_no_mask_tells_of(engines: tuple[InferenceEngine, InferenceEngine]) -> None:
    """Hugging Face takes pad tokens for padding; so do pages."""
    padded = PROMPTS.masked_fill(MASK == 0, 0)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected, found = (engine.generate(padded, **options) for engine in engines)
    assert torch.equal(expected, found)
    assert torch.equal(found, engines[1].generate(padded, attention_mask=MASK, **options))


@pytest.mark.parametrize("sample", [False, True])
def test_streamers_get_every_token(engines: tuple[InferenceEngine, InferenceEngine], sample: bool) -> None:
    class Keep(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended = True

    kept = []
    for engine in engines:
        torch.manual_seed(5)
        streamer = Keep()
        result = engine.generate(PROMPTS[:1], max_new_tokens=10, do_sample=sample, streamer=streamer)
        assert streamer.ended
        assert streamer.seen == result[0].tolist()
        kept.append(streamer.seen)
    assert kept[0] == kept[1]


def test_calls_of_other_sizes_do_not_disturb_each_other(engines: tuple[InferenceEngine, InferenceEngine]) -> None:
    for rows, columns, new in ((1, 3, 30), (3, 9, 4), (2, 5, 50), (1, 9, 1), (3, 2, 17)):
        prompts = PROMPTS[:rows, :columns]
        expected, found = (engine.generate(prompts, max_new_tokens=new, do_sample=False) for engine in engines)
        assert torch.equal(expected, found), (rows, columns, new)


def test_what_pages_do_not_know_is_said_once(
    engines: tuple[InferenceEngine, InferenceEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="outpace"):
        for _ in range(2):
            both(engines, do_sample=False, prompt_lookup_num_tokens=None, stop_strings=None, use_cache=False)
            both(engines, do_sample=False, return_dict_in_generate=True)
    said = [record.getMessage() for record in caplog.records if "Hugging Face's loop" in record.getMessage()]
    assert len([line for line in said if "return_dict_in_generate" in line]) <= 1


def test_a_model_that_pages_refuse_goes_to_hugging_face(caplog: pytest.LogCaptureFixture) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    config = Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )  # fmt: skip
    plain, fused = (randomised(Phi3ForCausalLM(config)) for _ in range(2))
    expected = outpace.init_inference(plain).generate(PROMPTS, max_new_tokens=20, do_sample=False)
    engine = outpace.init_inference(fused, kernel_inject=True, max_out_tokens=64)
    with caplog.at_level(logging.INFO, logger="outpace"):
        assert torch.equal(engine.generate(PROMPTS, max_new_tokens=20, do_sample=False), expected)
    assert any("longrope" in record.getMessage() for record in caplog.records)


def test_threads_get_their_own_tokens(engines: tuple[InferenceEngine, InferenceEngine]) -> None:
    prompts = [PROMPTS[:1, : 3 + n] + n for n in range(6)]
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = [engines[0].generate(prompt, **options) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: engines[1].generate(prompt, **options), prompts))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_threads_that_come_first_together_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = outpace.init_inference(tiny("llama"), kernel_inject=True)
    made, together = [], threading.Barrier(2)

    def paged(*args: Any, **options: Any) -> PagedDecoder:
        made.append(1)
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # the other thread comes here too, if it can
        return PagedDecoder(*args, **options)

    monkeypatch.setattr(fast_generate, "PagedDecoder", paged)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rows: engine.generate(PROMPTS[:rows], max_new_tokens=4, do_sample=False), (1, 2)))
    assert len(made) == 1


@pytest.mark.parametrize("ends", [(3, 40, 41), torch.tensor([3, 40, 41])], ids=["tuple", "tensor"])
def test_ends_given_in_other_ways(engines: tuple[InferenceEngine, InferenceEngine], ends: Any) -> None:
    expected, found = both(engines, do_sample=False, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(expected, found)


def test_a_generation_config_that_is_replaced_counts() -> None:
    plain, fused = (randomised(tiny("llama")) for _ in range(2))
    pair = outpace.init_inference(plain), outpace.init_inference(fused, kernel_inject=True)
    before = pair[1].generate(PROMPTS[:1], max_new_tokens=20, do_sample=False)
    for engine in pair:
        engine.generation_config = GenerationConfig(repetition_penalty=3.0, max_new_tokens=20)
        module: Any = engine.module
        assert module.generation_config.repetition_penalty == 3.0
    expected, found = (engine.generate(PROMPTS[:1]) for engine in pair)
    assert torch.equal(expected, found)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("where", ["model.layers.1", "lm_head", "model.norm"])
def test_hooks_that_are_added_later_are_called(where: str) -> None:
    plain, fused = (randomised(tiny("llama")) for _ in range(2))
    pair = outpace.init_inference(plain), outpace.init_inference(fused, kernel_inject=True)
    for engine in pair:
        engine.module.get_submodule(where).register_forward_hook(lambda module, inputs, output: output.flip(-1))
    expected, found = (engine.generate(PROMPTS[:1], max_new_tokens=12, do_sample=False) for engine in pair)
    assert torch.equal(expected, found)


def test_a_mask_of_another_shape_is_for_hugging_face(engines: tuple[InferenceEngine, InferenceEngine]) -> None:
    wide = torch.ones(3, 11, dtype=torch.long)
    options = {"attention_mask": wide, "max_new_tokens": 4, "do_sample": False}
    expected, found = (engine.generate(PROMPTS, **options) for engine in engines)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("call", [{"do_sample": False}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("implied", [False, True], ids=["given", "implied"])
def test_a_window_counts_the_holes_of_a_mask(call: dict[str, Any], implied: bool) -> None:
    plain, fused = (randomised(tiny("gemma3")) for _ in range(2))
    pair = outpace.init_inference(plain), outpace.init_inference(fused, kernel_inject=True)
    ids = torch.randint(3, 90, (6, 30), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[:, 18:26] = 0
    padding: dict[str, Any] = {"pad_token_id": 1} if implied else {"attention_mask": mask}
    inputs = ids.where(mask > 0, 1)
    expected, found = (engine.generate(inputs, max_new_tokens=12, seed=3, **padding, **call) for engine in pair)
    assert torch.equal(expected, found)
