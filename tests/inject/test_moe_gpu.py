"""Mixtures of experts on a GPU: no further from the truth than Hugging Face's own, and the same tokens under graphs."""

import copy
from typing import Any

import pytest
import torch

import outpace
from outpace import LLM, SamplingParams
from tests.inject.checks import padded_prompts
from tests.inject.mixtures import MIXTURES, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

KERNELS: tuple[dict[str, str], ...] = ({}, {"experts": "triton", "route": "triton"})


@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "triton"])
@pytest.mark.parametrize("case", MIXTURES)
def test_errors_are_no_larger_than_hugging_faces(case: str, kernels: dict[str, str]) -> None:
    """Of the median token, over prompts: rounding may send a token to other experts, in either."""
    model = build(case)
    plain = outpace.init_inference(copy.deepcopy(model), dtype=torch.bfloat16)
    fused = outpace.init_inference(copy.deepcopy(model), dtype=torch.bfloat16, kernel_inject=True, kernels=kernels)
    exact = copy.deepcopy(plain.module).float().eval()  # the rounded weights, in exact arithmetic
    errors: list[list[torch.Tensor]] = [[], []]
    for seed in range(6):
        inputs = {name: value.cuda() for name, value in padded_prompts(97, seed=seed).items()}
        keep = inputs["attention_mask"].bool()
        with torch.no_grad():
            truth = exact(**inputs).logits[keep].double()
        for found, engine in zip(errors, (plain, fused), strict=True):
            off = engine(**inputs).logits[keep].double() - truth
            found.append(off.norm(dim=1) / truth.norm(dim=1))
    own, ours = (float(torch.cat(found).median()) for found in errors)
    assert ours <= 1.5 * own


@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "triton"])
@pytest.mark.parametrize("case", MIXTURES)
def test_tokens_in_fp32_equal_plain_hugging_face_with_and_without_graphs(case: str, kernels: dict[str, str]) -> None:
    model = build(case)
    inputs = {name: value.cuda() for name, value in padded_prompts(97).items()}
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **options)
    for graphs in (False, True):
        engine = outpace.init_inference(
            copy.deepcopy(model), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=graphs, kernels=kernels
        )
        for _ in range(2):  # the second call finds pages and graphs of the first
            assert torch.equal(engine.generate(**inputs, **options), expected), graphs


@pytest.mark.parametrize("case", ["mixtral", "qwen2", "gpt-oss", "dots1"])
def test_requests_in_mixed_steps_from_graphs(case: str) -> None:
    model = build(case)
    prompts = [row.tolist() for row in torch.randint(3, 97, (6, 19), generator=torch.Generator().manual_seed(0))]
    ids = [torch.tensor([prompt], device="cuda") for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    want = [model.generate(each, attention_mask=torch.ones_like(each), **options)[0, 19:].tolist() for each in ids]
    llm = LLM(copy.deepcopy(model), device="cuda", dtype="fp32", max_num_batched_tokens=16, max_num_seqs=8)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == want
