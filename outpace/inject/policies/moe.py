"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Phi-MoE, GPT-OSS, dots1, GLM-4-MoE."""

from dataclasses import replace
from typing import Any

from outpace.inject.policies.llama import LLAMA, QWEN3
from outpace.inject.policy import MoERoles
from outpace.kernels.routing import Routing


def _softmax(config: Any) -> Routing:
    return Routing(top_k=config.num_experts_per_tok, renormalise=config.norm_topk_prob)


def _in_groups(config: Any) -> Routing:
    """As DeepSeek-V3 chooses: by sigmoids with a correction, among the experts of the best groups."""
    return Routing(
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        renormalise=config.norm_topk_prob,
        epsilon=1e-20,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        kept_groups=config.topk_group,
        group_score="two",
    )


EXPERTS = MoERoles(block="mlp", router="mlp.gate", experts="mlp.experts", routing=_softmax)

MIXTRAL = replace(
    LLAMA,
    layers=("MixtralDecoderLayer",),
    moe=replace(EXPERTS, routing=lambda config: Routing(top_k=config.num_experts_per_tok, renormalise=True)),
)
QWEN2_MOE = replace(
    LLAMA,
    layers=("Qwen2MoeDecoderLayer",),
    moe=replace(EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
)
QWEN3_MOE = replace(QWEN3, layers=("Qwen3MoeDecoderLayer",), moe=EXPERTS)
OLMOE = replace(QWEN3, layers=("OlmoeDecoderLayer",), qk_norm_over="all", moe=EXPERTS)
PHI_MOE = replace(
    LLAMA,
    layers=("PhimoeDecoderLayer",),
    norm="layer",
    moe=replace(
        EXPERTS,
        router="mlp.router",
        routing=lambda config: Routing(
            top_k=config.num_experts_per_tok, score="mixer", jitter=config.router_jitter_noise
        ),
    ),
)
GPT_OSS = replace(
    LLAMA,
    layers=("GptOssDecoderLayer",),
    round_before_weight=False,
    sinks="self_attn.sinks",
    rotary_twice=False,
    moe=replace(
        EXPERTS,
        router="mlp.router",
        transposed=True,
        paired=True,
        routing=lambda config: Routing(top_k=config.num_experts_per_tok, score="chosen"),
        clamp=lambda config: (getattr(config, "swiglu_limit", 7.0), getattr(config, "swiglu_alpha", 1.702)),
    ),
)
DEEPSEEK_EXPERTS = replace(
    EXPERTS,
    correction="mlp.gate.e_score_correction_bias",
    shared="mlp.shared_experts",
    routing=_in_groups,
    in_float32=True,
)
DOTS1 = replace(QWEN3, layers=("Dots1DecoderLayer",), moe=DEEPSEEK_EXPERTS)
GLM4_MOE = replace(
    LLAMA,
    layers=("Glm4MoeDecoderLayer",),
    variant=lambda config: {"q_norm": QWEN3.q_norm, "k_norm": QWEN3.k_norm} if config.use_qk_norm else {},
    moe=DEEPSEEK_EXPERTS,
)

POLICIES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, PHI_MOE, GPT_OSS, DOTS1, GLM4_MOE)
