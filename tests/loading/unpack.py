"""Folders in the layout of compressed-tensors, read with numpy by the layout's description alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor


class Unpacked(NamedTuple):
    """A quantized weight: weight = (values - zero) * scale."""

    values: Tensor
    """As signed numbers, or as float8."""
    scale: Tensor
    zero: Tensor
    group: int

    @property
    def weight(self) -> Tensor:
        """In float32."""
        scale, zero = (
            each.float().repeat_interleave(self.group, 1)[:, : self.values.shape[1]] for each in (self.scale, self.zero)
        )
        return (self.values.float() - zero) * scale


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says of quantization."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def unpacked(folder: Path) -> dict[str, Unpacked]:
    """Every quantized weight by the name of its linear."""
    tensors, config = stored(folder), config_of(folder)
    return {
        name.removesuffix(".weight_scale"): _unpacked(name.removesuffix(".weight_scale"), tensors, config)
        for name in tensors
        if name.endswith(".weight_scale")
    }


def _unpacked(name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Unpacked:
    groups = [group for group in config["config_groups"].values() if name in group["targets"]]
    (said,) = groups or [group for group in config["config_groups"].values() if group["targets"] == ["Linear"]]
    assert name not in config["ignore"]
    bits, scale = said["weights"]["num_bits"], tensors[f"{name}.weight_scale"]
    zero = torch.zeros(scale.shape)
    if config["format"] == "pack-quantized":
        rows, columns = tensors[f"{name}.weight_shape"].tolist()
        values = _integers(tensors[f"{name}.weight_packed"], bits, columns)
        if not said["weights"]["symmetric"]:
            zero = _integers(tensors[f"{name}.weight_zero_point"].t(), bits, rows).t()
    else:
        values = tensors[f"{name}.weight"]
        columns = values.shape[1]
    assert said["weights"]["strategy"] == ("channel" if said["weights"]["group_size"] is None else "group")
    return Unpacked(values, scale, zero, said["weights"]["group_size"] or columns)


def _integers(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The first value of an int32 is in its lowest bits, and half of the range stands for zero."""
    words = packed.contiguous().numpy().view(np.uint32)
    parts = [(words >> np.uint32(bits * at)) & np.uint32(2**bits - 1) for at in range(32 // bits)]
    values = np.stack(parts, axis=-1).reshape(len(words), -1)[:, :columns]
    return torch.from_numpy(values.astype(np.int16) - 2 ** (bits - 1))
