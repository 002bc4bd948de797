"""Linears of somebody's model: which modules compute what a linear does, and what part they play."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from outpace.inject.modules import Made
from outpace.quant.rules import Role

ROLES: tuple[tuple[tuple[str, ...], Role], ...] = (
    (("lm_head", "embed_out", "output_projection", "decoder", "vocab_projector"), "head"),
    (("gate", "router", "shared_expert_gate"), "router"),
    (("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query", "key", "value", "query_key_value"), "qkv"),
    (("q_lin", "k_lin", "v_lin", "query_proj", "key_proj", "value_proj", "q", "k", "v", "Wqkv", "qkv_proj"), "qkv"),
)
"""What the last name of a linear says of its part."""


def role_of(path: str) -> Role:
    """The part of the linear at a path, by its name."""
    name = path.rpartition(".")[2]
    return next((role for names, role in ROLES if name in names), "other")


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear keeps its weight [in, out]."""
    return type(module) is Conv1D


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what a linear does, and nobody reads its weight behind its back."""
    kind = type(module)
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() != 2 or weight.numel() == 0:  # computed by somebody else, or nothing to round
        return False
    if kind in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear | Made):
        return False
    return kind.forward is nn.Linear.forward or _computes_alike(module)


def _computes_alike(module: nn.Linear) -> bool:
    """Whether a subclass with a forward of its own (Falcon's) gives what a linear gives, tried on small numbers."""
    trial = copy.copy(module)
    weight, x = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-2, 3, 8).view(2, 4)
    bias = None if module.bias is None else torch.tensor([0.5, -1.0, 2.0])
    kept = {"weight": weight, "bias": bias}
    trial.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(value, requires_grad=False) for name, value in kept.items()
    }
    trial.in_features, trial.out_features = 4, 3
    try:
        with torch.no_grad():
            found = trial.forward(x)
    except Exception:  # somebody's code, which may want anything
        return False
    expected = nn.functional.linear(x, weight, bias)
    return isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.allclose(found, expected))
