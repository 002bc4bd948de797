"""Reads the config of compressed-tensors: groups of layers by name, each with its own format."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outpace.errors import ModelError
from outpace.loading.foreign.compressed_tensors import PackQuantized, Quantized
from outpace.loading.foreign.format import CHANNEL, TENSOR, Format, Span
from outpace.loading.foreign.settings import Settings
from outpace.quant.scheme import Activations

_BYTES = ("int-quantized", "float-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_USE = "use a checkpoint in pack-quantized, int-quantized or float-quantized"


@dataclass(frozen=True)
class Group:
    """Layers with the same format."""

    targets: tuple[str, ...]
    layout: Format


@dataclass(frozen=True)
class ConfigGroups:
    """All groups, and the layers that are not quantized."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    note: str | None
    """The quantized activations and cache, for the log; None: there are none."""

    def find(self, name: str, dtype: torch.dtype) -> tuple[str, Format] | None:
        """(layer, format) of a stored tensor that is a quantized weight; None: it is not."""
        packed = name.endswith(".weight_packed")
        if not packed and not (name.endswith(".weight") and dtype.itemsize == 1):
            return None
        layer = name.rpartition(".")[0]
        if any(_named(layer, target) for target in self.ignore):
            raise ModelError(
                f"model: {layer} is stored quantized, but quantization_config.ignore names it; download the model again"
            )
        layout = self._layout(layer)
        if packed != isinstance(layout, PackQuantized):
            raise ModelError(
                f"model: {name} is not stored as quantization_config says ({layout.label}); download the model again"
            )
        return layer, layout

    def _layout(self, layer: str) -> Format:
        """The format of the group that names the layer, else that matches it, else that names its class."""
        # only linears are stored in this format, so a target that is a class must be Linear
        for fits in (str.__eq__, _named, lambda layer, target: target == "Linear"):
            for group in self.groups:
                if any(fits(layer, target) for target in group.targets):
                    return group.layout
        raise ModelError(
            f"model: {layer} is stored quantized, but no group of quantization_config.config_groups targets it; "
            "download the model again"
        )


def config_groups(settings: Settings) -> ConfigGroups:
    """Read the groups; unknown settings that change values are refused."""
    if (sparse := settings.part("sparsity_config").text_or("format", "dense")) != "dense":
        raise settings.refuse(f"sparsity {sparse!r}", "use a checkpoint without sparsity")
    if settings.part("transform_config").mapping("config_groups"):
        raise settings.refuse("transform_config (rotations at run time)", "use a checkpoint without transforms")
    part = settings.part("config_groups")
    if not part.values:
        raise settings.refuse("a config without config_groups", "download the model's config.json again")
    whole = settings.text_or("format", "")
    groups = tuple(_group(part, name, whole) for name in part.values)
    notes = [_activations(part.part(name)) for name in part.values if isinstance(part.values[name], Mapping)]
    if settings.mapping("kv_cache_scheme"):
        notes.append("a quantized cache")
    return ConfigGroups(groups, settings.texts("ignore"), ", ".join(sorted({each for each in notes if each})) or None)


def _group(part: Settings, name: str, whole: str) -> Group:
    if not isinstance(part.values[name], Mapping):
        raise part.refuse(f"{name}: a scheme by its name alone", "write its weights and targets into config.json")
    group = part.part(name)
    weights = group.part("weights")
    kind = group.text_or("format", whole)
    if not weights.values:
        raise group.refuse("a group that quantizes no weights", _USE)
    if kind not in (*_BYTES, _PACKED):
        raise group.refuse(f"format {kind!r}", _USE)
    targets = group.texts("targets")
    for target in targets:
        _check_pattern(target)
    return Group(targets, _layout(weights, _quantized_rows(group), packed=kind == _PACKED))


def _quantized_rows(group: Settings) -> Activations | None:
    """The scheme of activations, if one scale for each row suffices; None: they are not quantized."""
    found = group.part("input_activations")
    usual = found.text_or("strategy", "token").lower() in ("token", "tensor") and found.flag("symmetric", True)
    if not found.values or not usual or found.choice("num_bits", range(1, 17), 8) != 8:
        return None
    return "fp8" if found.text_or("type", "int").lower() == "float" else "int8"


def _layout(weights: Settings, activations: Activations | None, packed: bool) -> Format:
    symmetric, order = weights.flag("symmetric", True), weights.values.get("actorder")
    act_order = order is True or (isinstance(order, str) and order.lower() in ("group", "dynamic"))
    kind = weights.text("type", "int").lower()
    if kind not in ("int", "float"):
        raise weights.refuse(f"type {kind!r}", _USE)
    span = _span(weights)
    if packed:
        if kind != "int":
            raise weights.refuse("pack-quantized floats", _USE)
        bits = weights.choice("num_bits", (4, 8))
        if not symmetric and span == TENSOR:
            raise weights.refuse("an asymmetric strategy 'tensor'", _USE)
        return PackQuantized(bits, span, symmetric, act_order)
    weights.choice("num_bits", (8,) if kind == "float" else (4, 8))  # 4-bit values also take one byte each
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    return Quantized(dtype, span, symmetric, act_order, activations)


def _span(weights: Settings) -> Span:
    """The rows and columns that share a scale."""
    size = weights.values.get("group_size")
    guess = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text_or("strategy", guess).lower()
    if strategy == "tensor":
        return TENSOR
    if strategy == "channel":
        return CHANNEL
    if strategy == "group":
        return Span(1, weights.group_size("group_size", None))
    if strategy == "block" and (blocks := weights.pair("block_structure")) is not None:
        return Span(blocks[0], blocks[1], whole_groups=False)
    raise weights.refuse(f"strategy {strategy!r}", "use a checkpoint with strategy tensor, channel, group or block")


def _activations(group: Settings) -> str | None:
    """The quantized activations of a group, for the log; None: there are none."""
    for key in ("input_activations", "output_activations"):
        found = group.part(key)
        if found.values:
            scheme = "dynamic" if found.values.get("dynamic") else "static"
            kind = "fp" if found.text_or("type", "int").lower() == "float" else "int"
            return f"{scheme} {kind}{found.choice('num_bits', range(1, 17), 8)} activations"
    return None


def _check_pattern(target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise ModelError(
                f"model: quantization_config.config_groups: targets: {target[:60]!r} is not a valid pattern "
                f"({error}); download the model's config.json again"
            ) from error


def _named(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return layer == target
