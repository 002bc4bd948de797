"""Granite and Granite MoE: Llama's layer with a multiplier at the embedding, the scores, each block and the logits."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA, MODEL
from outpace.inject.policy import MoERoles
from outpace.kernels.routing import Routing

GRANITE = replace(
    LLAMA,
    layers=("GraniteDecoderLayer",),
    placement="scaled",
    readers={"scale": lambda config, index: config.attention_multiplier},
    model=replace(
        MODEL,
        embed_scale=lambda config: config.embedding_multiplier,
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
)

_EXPERTS = MoERoles(
    block="block_sparse_moe",
    router="block_sparse_moe.router",
    experts="block_sparse_moe.experts",
    routing=lambda config: Routing(top_k=config.num_experts_per_tok, score="chosen"),
)
_SHARED = replace(_EXPERTS, shared="shared_mlp", shared_up="input_linear", shared_down="output_linear")
GRANITE_MOE = replace(GRANITE, layers=("GraniteMoeDecoderLayer",), moe=_EXPERTS)
GRANITE_MOE_SHARED = replace(
    GRANITE,
    layers=("GraniteMoeSharedDecoderLayer",),
    variant=lambda config: {"moe": _SHARED if config.shared_intermediate_size else _EXPERTS},
)

POLICIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED)
