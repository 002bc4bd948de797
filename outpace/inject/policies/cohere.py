"""Command R (Cohere, Cohere 2): attention and MLP from one norm, neighbours as rotary pairs, scaled logits."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA
from outpace.inject.policy import ModelRoles

COHERE = replace(
    LLAMA,
    layers=("CohereDecoderLayer",),
    placement="parallel",
    norm="layer",
    mlp_norm=None,
    interleaved=True,
    model=ModelRoles(
        embed="model.embed_tokens", layers="model.layers", norm="model.norm", rotary="model.rotary_emb",
        logit_scale=lambda config: config.logit_scale,
    ),
    refuses=lambda config: "norms each head with weights of its own (use_qk_norm)" if config.use_qk_norm else None,
)  # fmt: skip

COHERE2 = replace(
    COHERE,
    layers=("Cohere2DecoderLayer",),
    readers={"rotary": lambda config, index: config.layer_types[index] == "sliding_attention"},
    refuses=lambda config: None,
)

POLICIES = (COHERE, COHERE2)
