"""What Hugging Face gives with weights that are rounded as ours are."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.loading.unpack import stored, unpacked
from tests.quant.fake import rounded


def as_quantized(made: Any, out: Path, *, rows: bool = False) -> Any:
    """Hugging Face's model with what a folder stands for. rows: activations are quantized to int8."""
    for name, tensor in stored(out).items():
        if "norm" in name or name.endswith(".bias"):
            made.get_parameter(name).data = tensor.float()
    for name, part in unpacked(out).items():
        made.get_parameter(f"{name}.weight").data = part.weight
        if rows:
            made.get_submodule(name).register_forward_pre_hook(lambda _, args: (by_token(args[0]),))
    return made


def by_token(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


def rounded_int4(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 64, or of 128 where they fit; the head is int8."""
    group = 128 if weight.shape[1] % 128 == 0 else 64
    return rounded(weight) if len(weight) > 40_000 else rounded(weight, bits=4, group=group)
