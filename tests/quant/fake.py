"""Quantized models by separate code: weights are rounded and restored in place, and Hugging Face runs them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def rounded(weight: Tensor, *, bits: int = 8, group: int | None = None) -> Tensor:
    """Symmetric: one scale for a row in fp32, or one for a group of its columns in fp16, rounded up."""
    rows = weight.double().reshape(len(weight), -1, group or weight.shape[1])
    highest = 2 ** (bits - 1) - 1
    scale = rows.abs().amax(dim=2, keepdim=True) / (highest if bits == 8 else highest + 0.5)
    if group is not None:
        near = scale.half().numpy()
        above = np.where(near < scale.numpy(), np.nextafter(near, np.float16(np.inf)), near)
        scale = torch.from_numpy(above).double()
    lowest = -highest if bits == 8 else -highest - 1
    return ((rows / scale).round().clamp(lowest, highest) * scale).reshape(weight.shape).to(weight.dtype)


def rounded_by_tensor(weight: Tensor) -> Tensor:
    """Symmetric: one scale for all."""
    return rounded(weight.reshape(1, -1)).reshape(weight.shape)


def rounded_asymmetric(weight: Tensor) -> Tensor:
    """256 steps from the least to the largest value of a row, 0 among them."""
    w = weight.double()
    low, high = w.amin(dim=1, keepdim=True).clamp(max=0), w.amax(dim=1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    return (((w / scale).round() + zero).clamp(0, 255).sub(zero) * scale).to(weight.dtype)


def rounded_fp8(weight: Tensor) -> Tensor:
    """The largest value of a row is 448."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def linears(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every linear, by its path."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield path, module


def untie(model: nn.Module) -> None:
    """Give linears weights of their own, so that a tied embedding stays as it is."""
    for _, module in linears(model):
        module.weight = nn.Parameter(module.weight.detach().clone())


@torch.no_grad()
def fake_quantized(model: Any, how: Any = rounded, activations: Any = None, **options: Any) -> Any:
    """The model with its linears' weights rounded, and their inputs too where `activations` rounds rows.

    Where they are fp8, those of the head are int8, and its inputs are not rounded.
    """
    untie(model)
    for path, module in linears(model):
        name = path.rpartition(".")[2]
        if name == "shared_expert_gate" or name in (getattr(model, "_keep_in_fp32_modules", None) or ()):
            continue
        turned = isinstance(module, Conv1D)
        weight = module.weight.t() if turned else module.weight
        head = how is rounded_fp8 and name in ("lm_head", "decoder")
        new = rounded(weight) if head else how(weight, **options)
        module.weight.copy_(new.t() if turned else new)
        if activations is not None and not head:
            module.register_forward_pre_hook(lambda _, args: (_by_token(args[0], activations),))
    return model


@torch.no_grad()
def fake_quantized_experts(model: Any, how: Any = rounded, **options: Any) -> Any:
    """The model with the weights of its stacks of experts rounded, each expert by itself."""
    for name, stack in model.named_parameters():
        if stack.dim() == 3 and "experts" in name.split("."):
            turned = "GptOss" in type(model).__name__  # [experts, in, out]
            for expert in stack:
                weight = expert.t() if turned else expert
                new = how(weight, **options)
                expert.copy_(new.t() if turned else new)
    return model


def _by_token(x: Tensor, how: Any) -> Tensor:
    result: Tensor = how(x.reshape(-1, x.shape[-1])).reshape(x.shape)
    return result
