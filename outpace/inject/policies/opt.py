"""OPT, all sizes: 350m norms after each part, embeds in fewer dimensions and has no last norm."""

from outpace.inject.policy import ModelRoles, Policy

OPT = Policy(
    layers=("OPTDecoderLayer",),
    norm="layer",
    attn_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up="fc1",
    gated=False,
    down="fc2",
    readers={"rotary": lambda config, index: False},
    variant=lambda config: {"placement": "pre" if config.do_layer_norm_before else "post"},
    model=ModelRoles(
        embed="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions",
        position_offset=2,
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    ),
)

POLICIES = (OPT,)
