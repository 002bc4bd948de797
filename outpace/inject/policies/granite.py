"""Granite and Granite MoE: Llama's layer with a multiplier at the embedding, the scores, each block and the logits."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA
from outpace.inject.policy import ModelRoles

GRANITE = replace(
    LLAMA,
    layers=("GraniteDecoderLayer",),
    placement="scaled",
    readers={"scale": lambda config, index: config.attention_multiplier},
    model=ModelRoles(
        embed="model.embed_tokens", layers="model.layers", norm="model.norm", rotary="model.rotary_emb",
        embed_scale=lambda config: config.embedding_multiplier, logit_scale=lambda config: 1 / config.logits_scaling,
    ),
)  # fmt: skip

GRANITE_MOE = replace(GRANITE, layers=("GraniteMoeDecoderLayer",), up=None, down=None, mlp="block_sparse_moe")

POLICIES = (GRANITE, GRANITE_MOE)
