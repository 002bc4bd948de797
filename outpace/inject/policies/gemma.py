"""Gemma 1, 2 and 3: norms around each block that store weight - 1, scaled embeddings, windows, caps on scores."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA, MODEL

GEMMA = replace(
    LLAMA,
    layers=("GemmaDecoderLayer",),
    norm_offset=1.0,
    round_before_weight=False,
    model=replace(MODEL, embed_scale=lambda config: config.hidden_size**0.5),
)

GEMMA2 = replace(
    GEMMA,
    layers=("Gemma2DecoderLayer",),
    placement="sandwich",
    attn_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    readers={"scale": lambda config, index: config.query_pre_attn_scalar**-0.5},
)

GEMMA3 = replace(
    GEMMA2,
    layers=("Gemma3DecoderLayer",),
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    readers={**GEMMA2.readers, "softcap": lambda config, index: 0.0},  # its config has one that its code never reads
)

POLICIES = (GEMMA, GEMMA2, GEMMA3)
