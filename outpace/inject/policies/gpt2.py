"""GPT-2, and the families with its layer: GPT-BigCode (one key head), GPT-Neo (windows in every second layer)."""

from dataclasses import replace
from typing import Any

from outpace.inject.policy import ModelRoles, Policy


def _gpt2_scale(config: Any, index: int) -> float:
    scale: float = (config.hidden_size // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
    return scale / (index + 1) if getattr(config, "scale_attn_by_inverse_layer_idx", False) else scale


def _cross_attention(config: Any) -> str | None:
    return "has cross-attention (add_cross_attention)" if config.add_cross_attention else None


GPT2 = Policy(
    layers=("GPT2Block",),
    norm="layer",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    out="attn.c_proj",
    up="mlp.c_fc",
    gated=False,
    down="mlp.c_proj",
    transposed=True,
    readers={"scale": _gpt2_scale, "rotary": lambda config, index: False},
    model=ModelRoles(
        embed="transformer.wte", layers="transformer.h", norm="transformer.ln_f", positions="transformer.wpe"
    ),
    refuses=_cross_attention,
)

GPT_BIGCODE = replace(
    GPT2,
    layers=("GPTBigCodeBlock",),
    qkv_layout="groups",
    transposed=False,
    readers={
        **GPT2.readers,
        "num_kv_heads": lambda config, index: 1 if config.multi_query else config.num_attention_heads,
    },
)

GPT_NEO = replace(
    GPT2,
    layers=("GPTNeoBlock",),
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    out="attn.attention.out_proj",
    transposed=False,
    own_window=True,
    returns_tuple=True,
    readers={
        "scale": lambda config, index: 1.0,
        "rotary": lambda config, index: False,
        "window": lambda config, index: config.window_size if config.attention_layers[index] == "local" else 0,
    },
    refuses=lambda config: None,
)

POLICIES = (GPT2, GPT_BIGCODE, GPT_NEO)
