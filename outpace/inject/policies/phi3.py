"""Phi-3 and Phi-4: q, k, v in one projection, gate and up in another, and rotary positions over part of a head."""

from outpace.inject.policy import ModelRoles, Policy

PHI3 = Policy(
    layers=("Phi3DecoderLayer",),
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv="self_attn.qkv_proj",
    out="self_attn.o_proj",
    up="mlp.gate_up_proj",
    down="mlp.down_proj",
    model=ModelRoles(embed="model.embed_tokens", layers="model.layers", norm="model.norm", rotary="model.rotary_emb"),
)

POLICIES = (PHI3,)
