"""Micro-batches: splits the arguments of a model call by rows, and joins the results."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outpace.parallel.group import Group
from outpace.parallel.stages import parts_of

_BY_ROWS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "x", "hidden_states"}
)
"""Arguments with a row for each row of the batch, or one row for all."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def in_parts(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int, beside: Group, device: torch.device
) -> list[Call]:
    """Split a call into at most `parts` calls; into one if an argument belongs to the batch as a whole.

    beside: group of ranks with other rows, which must make the same number of calls.
    """
    by_rows = {name: value for name, value in kwargs.items() if name in _BY_ROWS and isinstance(value, Tensor)}
    others = [value for name, value in kwargs.items() if name not in by_rows]
    first = next((value for value in (*args, *by_rows.values()) if isinstance(value, Tensor) and value.dim()), None)
    tied = any(isinstance(value, Tensor | Cache) for value in (*args[1:], *others))
    rows = 1 if first is None or tied else first.shape[0]
    parts = beside.least(min(rows, parts), device)
    if parts < 2:
        return [(args, dict(kwargs))]

    def cut(value: Any, start: int, stop: int) -> Any:
        whole = not isinstance(value, Tensor) or not value.dim() or value.shape[0] != rows
        return value if whole else value[start:stop]

    return [
        (tuple(cut(each, *part) for each in args), {**kwargs, **{name: cut(x, *part) for name, x in by_rows.items()}})
        for part in parts_of(rows, parts)
    ]


def joined(outputs: Sequence[Any]) -> Any:
    """Join the results of all parts."""
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, Cache):
        return _joined_caches(outputs)
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind(**{name: joined([each[name] for each in outputs]) for name in first})
    if isinstance(first, tuple | list):
        return type(first)(joined(each) for each in zip(*outputs, strict=True))
    return first


def _joined_caches(caches: Sequence[Any]) -> Any:
    """Join the KV caches of all parts in the first one."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("keys", "values"):
            parts: list[Any] = [vars(layer).get(name) for layer in layers]
            if all(isinstance(part, Tensor) for part in parts):
                setattr(layers[0], name, torch.cat(parts))
    return caches[0]
