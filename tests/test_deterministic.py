"""deterministic=True: bitwise the same logits and tokens whatever shares the batch, however the prompt was cut."""

import random
from typing import Any

import pytest
import torch

from outpace import LLM, LLMConfig, NotSupported, RequestOutput, SamplingParams
from tests.inject.mixtures import mixture
from tests.models import tiny

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "opt", "bloom", "mixtral")
EXPERTS = ("qwen2", "gpt-oss", "dots1", "olmoe")
ROOMY: dict[str, Any] = {"device": "cpu", "deterministic": True, "block_size": 16, "num_blocks": 400}
TIGHT: dict[str, Any] = {**ROOMY, "num_blocks": 9, "max_num_seqs": 6}  # requests have to give way to one another


def requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 97) for _ in range(32)]
    found = []
    for number in range(count):
        prompt = shared[: draw.choice((0, 16, 32))] + [draw.randrange(3, 97) for _ in range(draw.randint(1, 16))]
        params = SamplingParams(
            max_tokens=draw.randint(2, 12),
            temperature=draw.choice((0.0, 0.9)),
            seed=number,
            logprobs=2,
            ignore_eos=True,
        )
        found.append((prompt, params))
    return found


def model(family: str) -> Any:
    return mixture(family) if family in EXPERTS else tiny(family)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, which show every bit of the logits they are made of."""
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


QUANTIZED = (("llama", "int8"), ("gemma3", "fp8"))
"""Families with a quantized cache."""


@pytest.mark.parametrize(("family", "cache"), [*((each, "auto") for each in (*FAMILIES, *EXPERTS)), *QUANTIZED])
def test_bits_do_not_depend_on_the_batch(family: str, cache: str) -> None:
    work = requests(14, seed=1)
    prompts, params = [prompt for prompt, _ in work], [each for _, each in work]
    roomy: dict[str, Any] = {**ROOMY, "kv_cache_dtype": cache}
    alone = LLM(model(family), **roomy, enable_prefix_caching=False, max_num_batched_tokens=300)
    want = [answers(alone.generate(prompt, each))[0] for prompt, each in work]
    for options in (
        {**ROOMY, "max_num_seqs": 14, "max_num_batched_tokens": 64},
        {**ROOMY, "max_num_seqs": 5, "max_num_batched_tokens": 7, "async_scheduling": False},
        {**TIGHT, "max_num_batched_tokens": 40},
        {**TIGHT, "max_num_batched_tokens": 40, "swap_space": 0.01},
        {**TIGHT, "max_num_batched_tokens": 40, "kv_offloading_size": 0.01},
    ):
        crowd = LLM(model(family), **options, kv_cache_dtype=cache)
        for _ in range(2):  # the second time prefixes are in the cache
            assert answers(crowd.generate(prompts, params, use_tqdm=False)) == want, options


def test_without_it_bits_do_depend_on_the_batch() -> None:
    """Otherwise the test above would prove nothing."""
    work = requests(14, seed=1)
    options: dict[str, Any] = {**ROOMY, "deterministic": False}
    alone, crowd = (LLM(tiny("llama"), **options) for _ in range(2))
    want = [answers(alone.generate(prompt, each))[0] for prompt, each in work]
    found = answers(crowd.generate([prompt for prompt, _ in work], [each for _, each in work], use_tqdm=False))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    assert found != want


def test_models_that_cannot_promise_it_are_refused() -> None:
    with pytest.raises(NotSupported, match="deterministic: MixtralForCausalLM depends on the batch: its layers keep"):
        LLM(tiny("mixtral"), **ROOMY, moe={"enabled": False})
    assert LLMConfig(deterministic=True).deterministic


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("family", "cache"), [*((each, "auto") for each in ("llama", "qwen3", "mixtral", "gpt-oss")), *QUANTIZED]
)
def test_bits_on_a_gpu(family: str, cache: str, dtype: str) -> None:
    work = requests(40, seed=2)
    prompts, params = [prompt for prompt, _ in work], [each for _, each in work]
    common: dict[str, Any] = {"deterministic": True, "dtype": dtype, "block_size": 16, "max_num_seqs": 64}
    common["kv_cache_dtype"] = cache
    alone = LLM(model(family), **common, num_blocks=400, enable_prefix_caching=False, enforce_eager=True)
    want = [answers(alone.generate(prompt, each))[0] for prompt, each in work]
    sizes: tuple[dict[str, Any], ...] = (
        {"num_blocks": 400, "max_num_batched_tokens": 64},
        {"num_blocks": 30, "max_num_batched_tokens": 200},
    )
    for options in sizes:
        crowd = LLM(model(family), **common, **options)
        for _ in range(2):
            assert answers(crowd.generate(prompts, params, use_tqdm=False)) == want, options
