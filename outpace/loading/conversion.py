"""Applies Hugging Face's tables of renamed and merged weights to sources instead of tensors.

Only this file uses transformers' loading internals, which are not public and change between releases. It uses what 5.17
and 5.22 have in common: get_model_conversion_mapping, rename_source_key, dot_natural_key, add_tensor and convert of a
WeightConverter, and a model's all_tied_weights_keys, _keys_to_ignore_on_load_missing and _unexpected, and
_init_weights.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from outpace.errors import ModelError
from outpace.loading.problems import line
from outpace.loading.read_source import read
from outpace.loading.regions import Inexpressible, Traced
from outpace.loading.weights import Piece, Source

_Parts = list[tuple[str, Source]]
"""Inputs of a converter: (pattern that a stored name matched, its source), in natural order of names."""


def convert(
    model: PreTrainedModel, wanted: dict[str, Tensor], stored: Mapping[str, Source]
) -> tuple[dict[str, Source], dict[str, str]]:
    """(sources by the model's names, stored names that the model lacks -> the names that they were renamed to)."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Source] = {}
    merged: dict[str, tuple[Any, _Parts]] = {}
    extra: dict[str, str] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted or target in found or (pattern is None and target in merged):
            extra[name] = target
        elif pattern is None:
            found[target] = stored[name]
        else:
            merged.setdefault(target, (by_pattern[pattern], []))[1].append((pattern, stored[name]))
    fixed = _Fixed(model, wanted)
    for target, (converter, parts) in merged.items():
        made = _converted(converter, target, parts, fixed)
        if twice := sorted((made.keys() & found.keys()) | (made.keys() - wanted.keys())):
            raise ModelError(
                f"model: {', '.join(twice[:5])} is stored both whole and in parts; convert the model again"
            )
        found |= made
    return found, extra


def ties(model: nn.Module) -> dict[str, str]:
    """Name of a tied weight -> the name it is tied to. Removing an entry unties the weight in the model."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def may_miss(model: nn.Module, name: str) -> bool:
    """Whether the model's class allows checkpoints without this tensor."""
    return _listed(model, "_keys_to_ignore_on_load_missing", name)


def computed(model: nn.Module, name: str) -> Source | None:
    """A weight that checkpoints may omit because its class computes it, such as sinusoidal positions; else None."""
    if not isinstance(model, PreTrainedModel) or not may_miss(model, name):
        return None
    owner, _, leaf = name.rpartition(".")
    values = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(2):
            torch.manual_seed(seed)
            module = deepcopy(model.get_submodule(owner)).to_empty(device="cpu").float()
            # values that are not computed stay NaN, and NaN is unequal to itself
            value = getattr(module, leaf).detach().fill_(float("nan"))
            model._init_weights(module)
            values.append(value)
    if not torch.equal(*values):
        return None
    return Source(tuple(value.shape), value.dtype, (Piece(lambda: value, tuple(value.shape), value.dtype),))


def may_have(model: nn.Module, name: str) -> bool:
    """Whether the model's class ignores this tensor in checkpoints."""
    return _listed(model, "_keys_to_ignore_on_load_unexpected", name)


def quantization(model: nn.Module) -> Mapping[str, Any] | None:
    """The quantization_config of the model's config; None: there is none."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    if found is None or isinstance(found, Mapping):
        return found
    described = found.to_dict()  # an object of transformers
    return {**described, "quant_method": str(getattr(found.quant_method, "value", found.quant_method))}


def forget_quantization(model: nn.Module) -> None:
    """Remove quantization_config from the config, since weights become plain."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _listed(model: nn.Module, attribute: str, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


class _Fixed:
    """The attributes of the original model that conversion operations read."""

    def __init__(self, model: PreTrainedModel, wanted: dict[str, Tensor]) -> None:
        self.config = model.config
        self.get_parameter = dict(wanted).__getitem__


def _converted(converter: WeightConverter, target: str, parts: _Parts, model: _Fixed) -> dict[str, Source]:
    """The sources that a converter makes: regions of stored tensors if possible, else computed on demand."""
    try:
        return {name: tensor.source for name, tensor in _run(converter, target, parts, Traced.of, model).items()}
    except Inexpressible:
        shapes = _run(converter, target, parts, Source.empty, model)
    return {
        name: Source(tuple(shape.shape), shape.dtype, (_computed(converter, target, parts, model, name, shape),))
        for name, shape in shapes.items()
    }


def _computed(converter: WeightConverter, target: str, parts: _Parts, model: _Fixed, name: str, shape: Tensor) -> Piece:
    def make() -> Tensor:
        return _run(converter, target, parts, read, model)[name]

    return Piece(make, tuple(shape.shape), shape.dtype)


def _run(
    converter: WeightConverter, target: str, parts: _Parts, tensor: Callable[[Source], Any], model: _Fixed
) -> dict[str, Any]:
    """Run Hugging Face's conversion on tensors made from the sources."""
    converter = deepcopy(converter)  # a copy, because it collects tensors
    for pattern, source in parts:
        converter.add_tensor(target, target, pattern, tensor(source))
    try:
        made = converter.convert(target, model=model, config=model.config)
    except (RuntimeError, ValueError, LookupError) as error:
        raise ModelError(
            f"model: {target} cannot be made of its {len(parts)} stored tensors ({line(error)}): some are "
            "missing or have a wrong shape; download the model again"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
