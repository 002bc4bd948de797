"""GPT-NeoX (Pythia, Dolly, RedPajama), with attention and MLP in parallel or in sequence; Persimmon; Phi 1 and 2."""

from dataclasses import replace

from outpace.inject.policy import ModelRoles, Policy

GPT_NEOX = Policy(
    layers=("GPTNeoXLayer",),
    norm="layer",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv="attention.query_key_value",
    qkv_layout="heads",
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    gated=False,
    down="mlp.dense_4h_to_h",
    variant=lambda config: {"placement": "parallel" if config.use_parallel_residual else "pre"},
    model=ModelRoles(
        embed="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
    ),
)

PERSIMMON = replace(
    GPT_NEOX,
    layers=("PersimmonDecoderLayer",),
    qkv="self_attn.query_key_value",
    out="self_attn.dense",
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

PHI = replace(
    PERSIMMON,
    layers=("PhiDecoderLayer",),
    placement="parallel",
    mlp_norm=None,
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    qkv_layout="rows",
    up="mlp.fc1",
    down="mlp.fc2",
)

POLICIES = (GPT_NEOX, PERSIMMON, PHI)
