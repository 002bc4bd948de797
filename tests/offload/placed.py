"""Models whose layers are put where a test wants them, through the options that everybody has."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.offload.store_layout import ALIGN
from outpace.offload.units import Form, find_layers
from tests.models import tiny

LAYERS = 7
_NAMES = {"gpt2": "n_layer", "bloom": "n_layer", "t5": "num_layers"}
PLACES = ("host", "disk", "mixed", "some stay")
"""Where layers are: all in host memory, all on disk, both, or some on the device and the rest in both."""


def deep(family: str, layers: int = LAYERS, **changes: Any) -> Any:
    """A tiny model with enough layers to be streamed."""
    return tiny(family, **{_NAMES.get(family, "num_hidden_layers"): layers}, **changes)


def offload_at(place: str, model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The option `offload` that puts the layers of a model on a CPU there. Makes the folder if it is needed."""
    if place != "host":
        folder.mkdir(exist_ok=True)
    layers = [layer for _, layer in find_layers(model)]
    largest = max(_bytes(layer, dtype) for layer in layers)
    total = sum(math.prod(weight.shape) for weight in model.parameters()) * dtype.itemsize
    others = total - sum(math.prod(weight.shape) * dtype.itemsize for layer in layers for weight in layer.parameters())
    stay = 3 if place == "some stay" else 0
    host = {"host": len(layers), "disk": 0, "mixed": 3, "some stay": 2}[place]
    return {
        "device_memory": others + (2 + stay) * largest,
        "host_memory": host * largest,
        **({} if place == "host" else {"nvme": str(folder)}),
    }


def _bytes(layer: nn.Module, dtype: torch.dtype) -> int:
    """Of a layer as a unit, at the most: fused tensors are fewer. Each expert is rounded up to a page."""
    experts = max((len(weight) for weight in layer.parameters() if weight.dim() == 3), default=0)
    return Form.of(math.prod(weight.shape) * dtype.itemsize for weight in layer.parameters()).nbytes + experts * ALIGN
