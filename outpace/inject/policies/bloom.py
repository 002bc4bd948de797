"""BLOOM: ALiBi, a norm after the embedding, and residuals taken before the norms or after them."""

from typing import Any

from outpace.inject.policy import ModelRoles, Policy


def _sliced(config: Any) -> str | None:
    slices = config.slow_but_exact and config.pretraining_tp > 1
    return "computes in slices (slow_but_exact), which skips biases" if slices else None


BLOOM = Policy(
    layers=("BloomBlock",),
    norm="layer",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    qkv_layout="heads",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    gated=False,
    down="mlp.dense_4h_to_h",
    returns_tuple=True,
    readers={
        "rotary": lambda config, index: False,
        "alibi": lambda config, index: True,
        "activation": lambda config, index: "gelu_new",
    },
    variant=lambda config: {"placement": "normed" if config.apply_residual_connection_post_layernorm else "pre"},
    model=ModelRoles(
        embed="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        embed_norm="transformer.word_embeddings_layernorm",
    ),
    refuses=_sliced,
)

POLICIES = (BLOOM,)
