"""Which modules of a model are linears, and their roles."""

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
"""Role of a linear by the last part of its path."""


def role_of(path: str) -> Role:
    name = path.rpartition(".")[2]
    return next((role for names, role in ROLES if name in names), "other")


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear stores its weight [in, out]."""
    return type(module) is Conv1D


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes a linear, and no other code reads its weight."""
    kind = type(module)
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() != 2 or weight.numel() == 0:  # computed elsewhere, or empty
        return False
    if kind in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear | Made):
        return False
    return kind.forward is nn.Linear.forward or _computes_alike(module)


def _computes_alike(module: nn.Linear) -> bool:
    """Whether a subclass with its own forward (Falcon's) computes a linear: tried on small numbers."""
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
    except Exception:  # unknown code may raise anything
        return False
    expected = nn.functional.linear(x, weight, bias)
    return isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.allclose(found, expected))
