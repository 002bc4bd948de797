"""Mixtures of experts, fused: routers, stacks of experts, shared ones, and dense layers among them."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

import outpace
from outpace import LLM, ModelError, NotSupported, SamplingParams
from outpace.inject.experts import MixtureOfExperts
from outpace.kernels.gemv import gemv_ref
from tests.inject.checks import injected_copy, padded_prompts, randomised, same_forward, same_paged_logits, same_tokens

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"num_local_experts": 4}
QWEN: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 24}
QWEN2: dict[str, Any] = {**QWEN, "shared_expert_intermediate_size": 32}
OSS: dict[str, Any] = {"num_local_experts": 4, "head_dim": 12, "sliding_window": 5}
EXPERTS: dict[str, Any] = {"num_experts": 5}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True, "head_dim": 8,
}  # fmt: skip
MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 5.0,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TOLERANCE = 1e-5
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window, odd head": ("Mixtral", {**MIXTRAL, "sliding_window": 5, "head_dim": 20}),
    "qwen2": ("Qwen2Moe", QWEN2),
    "qwen2 mixed, windows": (
        "Qwen2Moe",
        {**QWEN2, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen2 no biases": ("Qwen2Moe", {**QWEN2, "qkv_bias": False, "norm_topk_prob": True}),
    "qwen3": ("Qwen3Moe", {**QWEN, "head_dim": 16}),
    "qwen3 sparse step, window": (
        "Qwen3Moe",
        {
            **QWEN, "head_dim": 20, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 1,
        },
    ),
    "olmoe": ("Olmoe", EXPERTS),
    "olmoe clipped, grouped": (
        "Olmoe", {**EXPERTS, "clip_qkv": 0.9, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 3},
    ),
    "phi-moe": ("Phimoe", {**MIXTRAL, "rope_parameters": PLAIN_ROPE}),
    "phi-moe biases, wide jitter": (
        "Phimoe",
        {
            **MIXTRAL, "num_local_experts": 7, "rope_parameters": PLAIN_ROPE, "attention_bias": True,
            "lm_head_bias": True, "router_jitter_noise": 0.4, "sliding_window": 6,
        },
    ),
    "dots1": ("Dots1", GROUPS),
    "dots1 unscaled, windows": (
        "Dots1",
        {
            **GROUPS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2,
            "sliding_window": 5, "max_window_layers": 1,
        },
    ),
    "glm4": ("Glm4Moe", GROUPS),
    "glm4 normed": ("Glm4Moe", {**GROUPS, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2}),
    "granite": ("GraniteMoe", {**MIXTRAL, **MULTIPLIERS}),
    "granite shared": ("GraniteMoeShared", {**MIXTRAL, **MULTIPLIERS, "shared_intermediate_size": 32}),
    "granite not shared": ("GraniteMoeShared", {**MIXTRAL, **MULTIPLIERS, "shared_intermediate_size": 0}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss no yarn, mha": (
        "GptOss",
        {
            **OSS, "num_key_value_heads": 6, "head_dim": 8, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt-oss yarn, full first": (
        "GptOss",
        {
            **OSS, "rope_parameters": YARN, "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip


@pytest.fixture(params=list(CASES), ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    return made(str(request.param))


def made(case: str, **changes: Any) -> Any:
    """The model of a case, with the same weights at every call."""
    family, options = CASES[case]
    config = getattr(hf, f"{family}Config")(**{**SMALL, **options, **changes})
    torch.manual_seed(0)  # vectors keep what their class gives them, with noise
    model = randomised(getattr(hf, f"{family}ForCausalLM")(config))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    return model


def test_forward(model: Any) -> None:
    same_forward(model, padded_prompts(97), TOLERANCE)


def test_tokens(model: Any) -> None:
    same_tokens(model, padded_prompts(97))
    same_paged_logits(model, 97, TOLERANCE)


def test_layers_with_experts_have_them_fused_and_the_others_are_dense(model: Any) -> None:
    own = [any(name.endswith("experts") for name, _ in layer.named_modules()) for layer in model.model.layers]
    for sparse, layer in zip(own, injected_copy(model)[1].layers, strict=True):
        assert isinstance(layer.mixture, MixtureOfExperts) == sparse
        assert (layer.up is not None) == (not sparse)
        assert layer.mlp is None


@pytest.mark.parametrize("case", {family: case for case, (family, _) in CASES.items()}.values())
def test_tokens_of_init_inference_and_llm(case: str) -> None:
    model, inputs = made(case), padded_prompts(97)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    want = model.generate(**inputs, **options)
    fused = outpace.init_inference(made(case), kernel_inject=True, device="cpu", dtype="fp32")
    assert torch.equal(fused.generate(**inputs, **options), want)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    llm = LLM(made(case), device="cpu", num_blocks=4, block_size=16, max_num_batched_tokens=5, max_num_seqs=3)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(2):  # the second time prefixes are in the cache
        outputs = llm.generate([*prompts, *prompts], greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == 2 * want[:, 12:].tolist()


def test_experts_that_are_left_alone_are_the_model_s_own() -> None:
    model, inputs = made("qwen2 mixed, windows"), padded_prompts(97)
    want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    fused = outpace.init_inference(copy.deepcopy(model), kernel_inject=True, device="cpu", moe={"enabled": False})
    assert not any(isinstance(module, MixtureOfExperts) for module in fused.module.modules())
    assert torch.equal(fused.generate(**inputs, max_new_tokens=8, do_sample=False), want)
    with pytest.raises(NotSupported, match=r"moe\.enabled=False: GraniteMoeSharedDecoderLayer keeps no experts"):
        outpace.init_inference(made("granite shared"), kernel_inject=True, device="cpu", moe=False)


def test_a_live_model_lets_go_of_each_stack_as_it_is_fused() -> None:
    model = made("gpt-oss")
    own = [layer.mlp.experts.gate_up_proj for layer in model.model.layers]
    outpace.init_inference(model, kernel_inject=True, device="cpu", dtype="fp32")
    assert [parameter.numel() for parameter in own] == [0, 0, 0]


def test_a_router_for_other_experts_is_refused() -> None:
    model = made("mixtral")
    model.model.layers[1].mlp.gate.weight = torch.nn.Parameter(torch.randn(7, 48))
    with pytest.raises(ModelError, match=r"mlp\.gate chooses among 7 experts, and mlp\.experts has 4"):
        outpace.init_inference(model, kernel_inject=True, device="cpu")


def test_router_logits_are_still_recorded() -> None:
    model, inputs = made("mixtral"), padded_prompts(97)
    expected, found = (item(**inputs, output_router_logits=True) for item in (model, injected_copy(model)[0]))
    real = inputs["attention_mask"].bool().flatten()
    for want, got in zip(expected.router_logits, found.router_logits, strict=True):
        torch.testing.assert_close(got.view(-1, 4)[real], want.view(-1, 4)[real], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen3", "qwen2", "glm4", "gpt-oss"])
def test_what_a_mixture_is_added_to_gets_the_same_sum(case: str) -> None:
    """Bit for bit as a sum behind it, with shared experts and without; over what is added, which may be its input."""
    mixture: Any = injected_copy(made(case))[1].layers[-1].mixture
    x, add = torch.randn(5, 48), torch.randn(5, 48)
    alone, (full, logits, chosen) = mixture(x), mixture.in_full(x)
    assert torch.equal(full, alone)
    want = add + alone
    assert torch.equal(mixture(x, None, add.clone()), want)
    full, other_logits, other_chosen = mixture.in_full(x, add=add.clone())
    assert torch.equal(full, want)
    assert torch.equal(other_logits, logits)
    assert torch.equal(other_chosen, chosen)
    want = x + alone
    assert torch.equal(mixture(x, None, x), want)


@torch.no_grad()
@pytest.mark.parametrize(("case", "rows"), [("qwen3", (1, 2)), ("gpt-oss", (1, 2)), ("dots1", ())])
def test_a_router_of_one_or_two_rows_takes_the_kernel_that_is_for_them(case: str, rows: tuple[int, ...]) -> None:
    """Where there is one, and where it computes in the model's dtype (dots1's does in float32)."""
    mixture: Any = injected_copy(made(case))[1].layers[-1].mixture
    router = mixture.router
    seen: list[int] = []

    def gemv(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(len(x))
        return gemv_ref(x, *args, **options)

    x = torch.randn(3, 48)
    wanted = [router(x[:count]) for count in (1, 2, 3)]
    router._kernels = replace(router._kernels, gemv=gemv)
    for count, want in zip((1, 2, 3), wanted, strict=True):
        torch.testing.assert_close(router(x[:count]), want)
    assert tuple(seen) == rows
