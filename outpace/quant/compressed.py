"""Writes the compressed-tensors format: names, shapes and bytes of a quantized weight, and the entry of config.json.

A weight without quantized activations is pack-quantized: unsigned integers packed into int32 along the columns, zero
points packed along the rows. With quantized activations it is a plain int8 or float8 tensor.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.packed import pack_nibbles
from outpace.quant.scheme import Scheme

METHOD = "compressed-tensors"
Form = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Suffix of a tensor's name -> its dtype and shape."""


def bits(scheme: Scheme) -> int:
    return 4 if scheme.values == "int4" else 8


def format_of(scheme: Scheme) -> str:
    """The name of the format for such a weight."""
    if scheme.values == "fp8":
        return "float-quantized"
    return "pack-quantized" if scheme.activations is None else "int-quantized"


def form(shape: tuple[int, int], scheme: Scheme) -> Form:
    """The tensors that are stored for a weight [N, K] instead of "<name>weight"."""
    rows, columns = shape
    scales = (rows, 1 if scheme.group is None else -(-columns // scheme.group))
    if format_of(scheme) != "pack-quantized":
        dtype = torch.float8_e4m3fn if scheme.values == "fp8" else torch.int8
        return {"weight": (dtype, shape), "weight_scale": (scheme.kept, scales)}
    fit = 32 // bits(scheme)
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "weight_packed": (torch.int32, (rows, -(-columns // fit))),
        "weight_scale": (scheme.kept, scales),
        "weight_shape": (torch.int64, (2,)),
    }
    if not scheme.symmetric:
        found["weight_zero_point"] = (torch.int32, (-(-rows // fit), scales[1]))
    return found


def stored(made: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """The result of `rounding.quantized` for some rows, as the tensors of `form` without `weight_shape`."""
    if format_of(scheme) != "pack-quantized":
        return {"weight": made[""], "weight_scale": made["_scale"]}
    found = {
        "weight_packed": _int32(made[""] if scheme.values == "int4" else made[""].view(torch.uint8) ^ 128),
        "weight_scale": made["_scale"],
    }
    if not scheme.symmetric:
        zero = made["_zero"].float().to(torch.int16).t()
        zero = pack_nibbles(zero) if scheme.values == "int4" else (zero + 128).to(torch.uint8)
        found["weight_zero_point"] = _int32(zero).t()
    return found


def _int32(data: Tensor) -> Tensor:
    """Bytes [n, m] as int32 [n, ceil(m / 4)], the first in the lowest bits."""
    padded = torch.nn.functional.pad(data, (0, -data.shape[1] % 4))
    return padded.reshape(-1).view(torch.int32).view(padded.shape[0], padded.shape[1] // 4)


def quantization_config(schemes: Mapping[str, Scheme], ignore: Iterable[str]) -> dict[str, Any]:
    """The entry of config.json. schemes: linear's name -> its scheme; ignore: names of linears that are not
    quantized."""
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    # the class name stands for all linears only if there is one group: readers may match the class before the names
    targets = {scheme: names if len(groups) > 1 else ["Linear"] for scheme, names in groups.items()}
    return {
        "config_groups": {f"group_{number}": _group(scheme, targets[scheme]) for number, scheme in enumerate(groups)},
        "format": format_of(next(iter(groups))),
        "global_compression_ratio": None,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    kind = "float" if scheme.values == "fp8" else "int"
    common: dict[str, Any] = {"actorder": None, "block_structure": None, "observer_kwargs": {}}
    weights = common | {
        "dynamic": False,
        "group_size": scheme.group,
        "num_bits": bits(scheme),
        "observer": "minmax",
        "strategy": "channel" if scheme.group is None else "group",
        "symmetric": scheme.symmetric,
        "type": kind,
    }
    token = {"dynamic": True, "group_size": None, "num_bits": 8, "observer": None, "strategy": "token"}
    rows = None if scheme.activations is None else common | token | {"symmetric": True, "type": kind}
    return {"input_activations": rows, "output_activations": None, "targets": targets, "weights": weights}
