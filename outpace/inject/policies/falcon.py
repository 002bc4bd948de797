"""Falcon: 7b (one key head), 40b and 180b (groups, two norms side by side), rw (ALiBi, one part after the other)."""

from collections.abc import Mapping
from typing import Any

import torch

from outpace.errors import NotSupported
from outpace.inject.policy import LayerSettings, ModelRoles, Policy, power_slopes


def _kv_heads(config: Any, index: int) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _layout(config: Any) -> Mapping[str, Any]:
    if not (config.new_decoder_architecture or config.parallel_attn):
        return {"placement": "pre", "mlp_norm": "post_attention_layernorm"}
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2):
        return {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    return {}


def _slopes(settings: LayerSettings, positions: int) -> list[float]:
    """Hugging Face rounds slopes, and slopes times positions, to bfloat16; then it scales them as it does scores."""
    slopes = torch.tensor(power_slopes(settings, positions)).bfloat16()[:, None]
    places = torch.arange(positions)
    if not torch.equal((slopes * places).float(), slopes.float() * places):
        raise NotSupported(
            f"pages: Falcon's ALiBi of {settings.num_heads} heads and {positions} positions is rounded to bfloat16, "
            "which pages do not do; Hugging Face's own loop can run it"
        )
    return [slope * settings.scale for slope in slopes[:, 0].tolist()]


def _twice(config: Any) -> str | None:
    twice = config.alibi and config._attn_implementation == "eager"
    return 'adds ALiBi twice with attn_implementation="eager"; load it with "sdpa"' if twice else None


FALCON = Policy(
    layers=("FalconDecoderLayer",),
    placement="parallel",
    norm="layer",
    attn_norm="input_layernorm",
    qkv="self_attention.query_key_value",
    qkv_layout="groups",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    gated=False,
    down="mlp.dense_4h_to_h",
    alibi_in_mask=True,
    slopes=_slopes,
    returns_tuple=True,
    readers={
        "num_kv_heads": _kv_heads,
        "rotary": lambda config, index: not config.alibi,
        "alibi": lambda config, index: bool(config.alibi),
    },
    variant=_layout,
    model=ModelRoles(
        embed="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        rotary="transformer.rotary_emb",
    ),
    refuses=_twice,
)

POLICIES = (FALCON,)
