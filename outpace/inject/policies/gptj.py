"""GPT-J, and CodeGen, whose fused qkv is cut in quarters."""

from dataclasses import replace

from outpace.inject.policy import ModelRoles, Policy

GPTJ = Policy(
    layers=("GPTJBlock",),
    placement="parallel",
    norm="layer",
    attn_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    up="mlp.fc_in",
    gated=False,
    down="mlp.fc_out",
    interleaved=True,
    rotary_table="attn.embed_positions",
    returns_tuple=True,
    model=ModelRoles(embed="transformer.wte", layers="transformer.h", norm="transformer.ln_f"),
)

CODEGEN = replace(GPTJ, layers=("CodeGenBlock",), qkv="attn.qkv_proj", qkv_layout="quarters")

POLICIES = (GPTJ, CODEGEN)
