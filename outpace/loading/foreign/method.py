"""Reads a checkpoint's quantization_config: which tensors are quantized weights, and in which format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outpace.errors import ModelError
from outpace.loading.foreign.awq import Awq
from outpace.loading.foreign.config_groups import config_groups
from outpace.loading.foreign.format import Format
from outpace.loading.foreign.fp8 import Fp8
from outpace.loading.foreign.gptq import Gptq
from outpace.loading.foreign.mxfp4 import Mxfp4
from outpace.loading.foreign.settings import Settings
from outpace.loading.strict_json import read_object

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Entries of config.json; older versions of compressed-tensors wrote the second."""
OLD_GPTQ = "quantize_config.json"
"""File that AutoGPTQ wrote before transformers supported GPTQ."""
Find = Callable[[str, torch.dtype], tuple[str, Format] | None]
"""(name, dtype) of a stored tensor -> (beginning of the name, format) if it is a quantized weight, else None."""


@dataclass(frozen=True)
class Method:
    """The quantization method of a checkpoint."""

    find: Find
    note: str | None = None
    """Its quantized activations and cache, for the log; None: it has none."""


def read_method(found: Mapping[str, Any]) -> Method:
    """The method of a quantization_config; unsupported ones are refused by name, with a remedy."""
    settings = Settings(found)
    name = settings.text("quant_method", "compressed-tensors" if "config_groups" in found else None)
    if name in _READERS:
        return _READERS[name](settings)
    raise settings.refuse(f"quant_method {name!r}", _REMEDIES.get(name, _REMEDY))


def stored_settings(folder: Path) -> Mapping[str, Any] | None:
    """The quantization_config of a model folder; {}: it has none; None: there is no config.json."""
    config = _object(folder / "config.json")
    for place in (config, config.get("text_config")):
        for key in CONFIG_KEYS:
            if isinstance(place, Mapping) and isinstance(place.get(key), Mapping):
                return place[key]
    older = _object(folder / OLD_GPTQ)
    if "bits" in older:
        return {"quant_method": "gptq", **older}
    return {} if config else None


def _object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path, "config")
    except ModelError:  # the reader that needs this file reports the error
        return {}


def _gptq(settings: Settings) -> Method:
    kind = settings.text("checkpoint_format", settings.text("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        raise settings.refuse(f"checkpoint_format {kind!r}", "use a GPTQ checkpoint with checkpoint_format gptq")
    if (words := settings.text("pack_dtype", "int32")) != "int32":
        raise settings.refuse(f"pack_dtype {words!r}", "use a checkpoint that is packed into int32")
    overrides = settings.mapping("dynamic")
    if any(not pattern.startswith("-:") for pattern in overrides):
        raise settings.refuse(
            "dynamic (settings for single layers)", "use a checkpoint with one setting for all layers"
        )
    layout = Gptq(
        bits=settings.choice("bits", (4, 8)),
        group_size=settings.group_size("group_size", -1),
        symmetric=settings.flag("sym", True),
        version=2 if kind == "gptq_v2" else 1,
        act_order=settings.flag("desc_act", False),
    )
    return Method(_by_ending(layout))


def _awq(settings: Settings) -> Method:
    version = settings.text("version", settings.text("format", "gemm")).lower()
    if version != "gemm" or settings.text("backend", "autoawq") == "llm-awq":
        raise settings.refuse(f"AWQ version {version!r}", "use a checkpoint of AutoAWQ's version gemm")
    settings.choice("bits" if "bits" in settings.values else "w_bit", (4,), 4)
    if not settings.flag("zero_point", True):
        raise settings.refuse("AWQ with zero_point false", "use a checkpoint with zero_point true")
    return Method(
        _by_ending(Awq(settings.group_size("group_size" if "group_size" in settings.values else "q_group_size", 128)))
    )


def _fp8(settings: Settings) -> Method:
    if (experts := settings.text("expert_dtype", "fp8")) != "fp8":
        raise settings.refuse(f"expert_dtype {experts!r}", "use a checkpoint with experts in fp8 or bfloat16")
    if (fmt := settings.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise settings.refuse(f"fmt {fmt!r}", "use a checkpoint in e4m3")
    kind = settings.text("activation_scheme", "dynamic")
    blocks = settings.pair("weight_block_size")
    # with blocks, activations have a scale for each 128 columns, which our kernels do not support: not quantized
    layout = Fp8(blocks, "fp8" if blocks is None else None)
    return Method(_of_dtype(layout), f"{kind} fp8 activations")


def _compressed_tensors(settings: Settings) -> Method:
    groups = config_groups(settings)
    return Method(groups.find, groups.note)


def _by_ending(layout: Format) -> Find:
    ending = layout.endings[0]
    return lambda name, dtype: (name.removesuffix(ending), layout) if name.endswith(ending) else None


def _of_dtype(layout: Format) -> Find:
    def find(name: str, dtype: torch.dtype) -> tuple[str, Format] | None:
        is_weight = dtype.is_floating_point and dtype.itemsize == 1 and not name.endswith(("_scale", "_scale_inv"))
        return (name, layout) if is_weight else None

    return find


_READERS: Mapping[str, Callable[[Settings], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": lambda settings: Method(_of_dtype(Fp8(None, "fp8")), "dynamic fp8 activations"),
    "mxfp4": lambda settings: Method(_by_ending(Mxfp4())),
    "compressed-tensors": _compressed_tensors,
}
_REMEDY = f"use the original weights, or a version in {', '.join(_READERS)}"
_REMEDIES: Mapping[str, str] = {
    "bitsandbytes": "its packing belongs to the bitsandbytes library; use the original weights, or a version in GPTQ, "
    "AWQ or compressed-tensors",
    "auto-round": "use a version that was exported as auto_gptq or auto_awq",
    "gguf": "name the .gguf file itself",
}
