"""Mixtures of experts, fused. That they give what Hugging Face gives is in `test_families.py`."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import outpace
from outpace import LLM, ModelError, NotSupported, SamplingParams
from outpace.inject.experts import MixtureOfExperts
from outpace.kernels.gemv import fused_linear_torch
from tests.inject.checks import injected_copy, padded_prompts
from tests.inject.mixtures import MIXTURES, mixture


@pytest.mark.parametrize("case", MIXTURES)
def test_layers_with_experts_have_them_fused_and_the_others_are_dense(case: str) -> None:
    model = mixture(case)
    own = [any(name.endswith("experts") for name, _ in layer.named_modules()) for layer in model.model.layers]
    for sparse, layer in zip(own, injected_copy(model)[1].layers, strict=True):
        assert isinstance(layer.mixture, MixtureOfExperts) == sparse
        assert (layer.up is not None) == (not sparse)
        assert layer.mlp is None


@pytest.mark.parametrize("case", {family: case for case, (family, _) in MIXTURES.items()}.values())
def test_tokens_of_init_inference_and_llm(case: str) -> None:
    model, inputs = mixture(case), padded_prompts(97)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    want = model.generate(**inputs, **options)
    fused = outpace.init_inference(mixture(case), kernel_inject=True, device="cpu", dtype="fp32")
    assert torch.equal(fused.generate(**inputs, **options), want)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    llm = LLM(mixture(case), device="cpu", num_blocks=4, block_size=16, max_num_batched_tokens=5, max_num_seqs=3)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(2):  # the second time prefixes are in the cache
        outputs = llm.generate([*prompts, *prompts], greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == 2 * want[:, 12:].tolist()


def test_experts_that_are_left_alone_are_the_model_s_own() -> None:
    model, inputs = mixture("qwen2 mixed, windows"), padded_prompts(97)
    want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    fused = outpace.init_inference(copy.deepcopy(model), kernel_inject=True, device="cpu", moe={"enabled": False})
    assert not any(isinstance(module, MixtureOfExperts) for module in fused.module.modules())
    assert torch.equal(fused.generate(**inputs, max_new_tokens=8, do_sample=False), want)
    with pytest.raises(
        NotSupported, match=r"moe\.enabled=False: GraniteMoeSharedDecoderLayer cannot keep its own experts"
    ):
        outpace.init_inference(mixture("granite shared"), kernel_inject=True, device="cpu", moe=False)


def test_a_live_model_lets_go_of_each_stack_as_it_is_fused() -> None:
    model = mixture("gpt-oss")
    own = [layer.mlp.experts.gate_up_proj for layer in model.model.layers]
    outpace.init_inference(model, kernel_inject=True, device="cpu", dtype="fp32")
    assert [parameter.numel() for parameter in own] == [0, 0, 0]


def test_a_router_for_other_experts_is_refused() -> None:
    model = mixture("mixtral")
    model.model.layers[1].mlp.gate.weight = torch.nn.Parameter(torch.randn(7, 48))
    with pytest.raises(ModelError, match=r"mlp\.gate chooses among 7 experts, and mlp\.experts has 4"):
        outpace.init_inference(model, kernel_inject=True, device="cpu")


def test_router_logits_are_still_recorded() -> None:
    model, inputs = mixture("mixtral"), padded_prompts(97)
    expected, found = (item(**inputs, output_router_logits=True) for item in (model, injected_copy(model)[0]))
    real = inputs["attention_mask"].bool().flatten()
    for want, got in zip(expected.router_logits, found.router_logits, strict=True):
        torch.testing.assert_close(got.view(-1, 4)[real], want.view(-1, 4)[real], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen3", "qwen2", "glm4", "gpt-oss"])
def test_what_a_mixture_is_added_to_gets_the_same_sum(case: str) -> None:
    """Bit for bit as a sum behind it, with shared experts and without; over what is added, which may be its input."""
    fused: Any = injected_copy(mixture(case))[1].layers[-1].mixture
    x, add = torch.randn(5, 48), torch.randn(5, 48)
    alone, (full, logits, chosen) = fused(x), fused.in_full(x)
    assert torch.equal(full, alone)
    want = add + alone
    assert torch.equal(fused(x, None, add.clone()), want)
    full, other_logits, other_chosen = fused.in_full(x, add=add.clone())
    assert torch.equal(full, want)
    assert torch.equal(other_logits, logits)
    assert torch.equal(other_chosen, chosen)
    want = x + alone
    assert torch.equal(fused(x, None, x), want)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["qwen3", "gpt-oss", "dots1"])
def test_a_router_of_few_rows_takes_the_kernel_that_is_for_them(case: str, dtype: torch.dtype) -> None:
    """Where there is one, of several rows for tensor cores alone, and where it computes in the model's dtype (dots1's
    does in float32)."""
    rows = () if case == "dots1" else (1,) if dtype == torch.float32 else (1, 2, 3)
    fused: Any = injected_copy(mixture(case))[1].layers[-1].mixture
    router = fused.router.to(dtype)
    seen: list[int] = []

    def gemv(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(len(x))
        return fused_linear_torch(x, *args, **options)

    x = torch.randn(3, 48, dtype=dtype)
    wanted = [router(x[:count]) for count in (1, 2, 3)]
    router._kernels = replace(router._kernels, gemv=gemv)
    for count, want in zip((1, 2, 3), wanted, strict=True):
        torch.testing.assert_close(router(x[:count]), want)
    assert tuple(seen) == rows
