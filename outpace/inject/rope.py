"""Positions: tables of cos and sin, made by the model's own rotary module, and slopes of ALiBi."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ModelError, NotSupported
from outpace.inject.apply import Injected
from outpace.inject.modules import FusedLayer
from outpace.inject.parts import Parts
from outpace.inject.policy import Policy
from outpace.log import size_text

Table = tuple[Tensor | None, Tensor | None]
"""cos and sin [positions, R / 2] in float32; None: no rotation."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies change with the longest position of a call."""


def rope_tables(model: nn.Module, injected: Injected, count: int) -> list[Table]:
    """The table of `count` positions for each layer. The model's own rotary module makes it, so any rope type works."""
    roles = injected.policy.model
    if injected.policy.rotary_table is not None:
        return [(layer.cos, layer.sin) if layer.settings.rotary else (None, None) for layer in injected.layers]
    if roles is None or roles.rotary is None:
        return [(None, None)] * len(injected.layers)
    rotary: Any = Parts(model)(roles.rotary)
    made: dict[str | None, Table] = {}
    tables: list[Table] = []
    for layer in injected.layers:
        kind = _rotary_kind(rotary, injected.config, layer.index)
        if kind not in made:
            made[kind] = _table(rotary, kind, count, injected.policy)
        tables.append(made[kind] if layer.settings.rotary else (None, None))
    return tables


def alibi_slopes(layer: FusedLayer, count: int, device: torch.device) -> Tensor | None:
    """ALiBi's slope of each head; None: the layer has no ALiBi."""
    if not layer.settings.alibi:
        return None
    slopes = torch.tensor(layer.policy.slopes(layer.whole, count), dtype=torch.float32, device=device)
    return slopes.narrow(0, layer.first_head, layer.settings.num_heads).contiguous()


def _table(rotary: Any, kind: str | None, count: int, policy: Policy) -> Table:
    device = next(buffer.device for buffer in rotary.buffers())
    positions = torch.arange(count, device=device)[None]
    like = torch.zeros(1, dtype=torch.float32, device=device)
    cos, sin = rotary(like, positions) if kind is None else rotary(like, positions, kind)
    return policy.once(cos[0]).float().contiguous(), policy.once(sin[0]).float().contiguous()


def _rotary_kind(rotary: Any, config: Any, index: int) -> str | None:
    """Kind of a layer for rotary modules with a table for each kind (Gemma 3)."""
    types = getattr(rotary, "layer_types", None)
    return None if types is None else config.layer_types[index]


def rope_types(config: Any) -> set[str]:
    return {rope["rope_type"] for rope in _ropes(config) if "rope_type" in rope}


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Rope parameters of each kind of layer, or of all."""
    given = getattr(config, "rope_parameters", None) or {}
    return [value for value in given.values() if isinstance(value, dict)] or [given]


def _width(config: Any) -> int:
    """Values of a head that are rotated, at most; 0: the config does not say."""
    for name in ("qk_rope_head_dim", "head_dim"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0


def check_length(config: Any, count: int) -> None:
    """Raise for a rope type whose table changes within `count` positions, or if the table would fill all memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = 2 * 4 * count * _width(config)  # cos and sin in float32
    if size > memory:
        raise ModelError(
            f"model: config.json: max_position_embeddings: the table of {count} positions has {size_text(size)}, and "
            f"this machine {size_text(memory)} of memory; correct it, or give a smaller max_model_len"
        )
    for rope in _ropes(config):
        names = ("original_max_position_embeddings", "max_position_embeddings")
        limit: Any = rope.get(names[0]) or next((n for name in names if (n := getattr(config, name, None))), count)
        if rope.get("rope_type") in LENGTH_DEPENDENT and count > limit:
            raise NotSupported(
                f"rope type {rope['rope_type']} changes its frequencies with the length beyond {limit} positions, "
                f"which pages cannot follow; keep max_out_tokens at {limit} or less"
            )
