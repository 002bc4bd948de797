"""Refuses a config whose numbers cannot be true, before a model is made of it, and says which field is wrong."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.loading.problems import line

_MOST_LAYERS = 10_000
_USUAL_LAYERS = 1024
"""Above this number the weights must have a tensor for each layer."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_WIDTHS = ("hidden_size", "intermediate_size", "vocab_size", "n_embd", "n_inner", "d_model", "ffn_dim", "head_dim")
_USUAL_WIDTH = 1 << 20
"""Widths up to this are never refused here: a config may name widths of parts that the model does not have."""
_PACKED = 64
"""How many values one stored value may hold, or how many ranks a width may be divided over."""


def check_layers(fields: Mapping[str, Any], where: str) -> None:
    """Raise for more layers than any model has. Needs no weights; making them would take minutes, and much memory."""
    for name, value in _numbers(fields):
        if _leaf(name) in _LAYERS and value > _MOST_LAYERS:
            raise ModelError(f"{where}: {name}: {value} is more than {_MOST_LAYERS}, the most layers; correct it")


def check_sizes(fields: Mapping[str, Any], shapes: Iterable[tuple[int, ...]], where: str) -> None:
    """Raise for a config that cannot belong to weights of these shapes. Allocates nothing."""
    found = list(shapes)
    largest = max((size for shape in found for size in shape), default=0)
    for name, value in _numbers(fields):
        if _leaf(name) in _LAYERS and value > max(_USUAL_LAYERS, len(found)):
            problem = f"the weights have {len(found)} tensors in all"
        elif _leaf(name) in _WIDTHS and value > max(_USUAL_WIDTH, _PACKED * largest):
            problem = f"the largest dimension of the weights is {largest}"
        else:
            continue
        raise ModelError(f"{where}: {name}: {value}, but {problem}; use the config and the weights of one model")


def reason(error: Exception, fields: Mapping[str, Any]) -> str:
    """Why transformers made no model of a config: the field and its value if they can be told, else its error."""
    if isinstance(error, ZeroDivisionError):
        zeros = [f"{name}: 0" for name, value in _numbers(fields) if value == 0 and _counts(name)]
        return f"{', '.join(zeros)} cannot be divided by" if zeros else line(error)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        names = [name for name, value in _leaves(fields) if value == error.args[0]]
        return f"{names[0] + ': ' if names else ''}{error.args[0]!r:.60} is not known"
    if "allocate memory" in str(error) and (sizes := dict(_numbers(fields))):
        name = max(sizes, key=lambda each: sizes[each])
        return f"{name}: {sizes[name]} is the largest number in it, and the model does not fit into memory"
    return line(error)


def fields_of(config: Path) -> dict[str, Any]:
    """The content of a config.json, for `reason`; empty if it cannot be read."""
    try:
        content = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _counts(name: str) -> bool:
    return _leaf(name).startswith(("num_", "n_")) or _leaf(name).endswith(("_size", "_dim", "_heads", "_groups"))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Whole numbers of a config by dotted name."""
    for name, value in _leaves(fields):
        if isinstance(value, int) and not isinstance(value, bool) and not name.endswith("token_id"):
            yield name, value


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
