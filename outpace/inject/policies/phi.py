"""Phi 1, 1.5 and 2: attention and MLP side by side behind one norm, part of each head rotated."""

from outpace.inject.policy import ModelRoles, Policy

PHI = Policy(
    layers=("PhiDecoderLayer",),
    placement="parallel",
    norm="layer",
    attn_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.dense",
    up="mlp.fc1",
    gated=False,
    down="mlp.fc2",
    variant=lambda config: (
        {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"} if config.qk_layernorm else {}
    ),
    model=ModelRoles(
        embed="model.embed_tokens",
        layers="model.layers",
        norm="model.final_layernorm",
        rotary="model.rotary_emb",
    ),
)

POLICIES = (PHI,)
