"""MPT: ALiBi, and no biases."""

from outpace.inject.policy import ModelRoles, Policy

MPT = Policy(
    layers=("MptBlock",),
    norm="layer",
    attn_norm="norm_1",
    mlp_norm="norm_2",
    qkv="attn.Wqkv",
    out="attn.out_proj",
    up="ffn.up_proj",
    gated=False,
    down="ffn.down_proj",
    mask_forbids=True,
    returns_tuple=True,
    readers={
        "scale": lambda config, index: config.attn_config.softmax_scale or (config.d_model / config.n_heads) ** -0.5,
        "clip": lambda config, index: config.attn_config.clip_qkv or 0.0,
        "rotary": lambda config, index: False,
        "alibi": lambda config, index: True,
        "activation": lambda config, index: "gelu",
    },
    model=ModelRoles(embed="transformer.wte", layers="transformer.blocks", norm="transformer.norm_f"),
)

POLICIES = (MPT,)
