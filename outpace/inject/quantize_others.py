"""Quantized linears in the place of those that injection leaves alone: of plain modules, encoders, level 0."""

from torch import nn
from transformers.pytorch_utils import Conv1D

from outpace.inject.make import Maker
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen
from outpace.quant.rules import KEEP, Role, Rules

ROLES: tuple[tuple[tuple[str, ...], Role], ...] = (
    (("lm_head", "embed_out", "output_projection"), "head"),
    (("gate", "router"), "router"),
    (("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query", "key", "value", "query_key_value", "q_lin"), "qkv"),
)
"""What the last name of a linear says of its part."""


def quantize_others(model: nn.Module, kernels: Kernels, rules: Rules) -> None:
    """Swap every linear that is still the model's own, if a rule wants it."""
    if rules is KEEP:
        return
    make = Maker(model, kernels, rules)
    swapped = 0
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) not in (nn.Linear, Conv1D):
            continue
        made = make.linear([module], _role(path), transposed=type(module) is Conv1D)
        if made.recipes["weight"].scheme is None:
            continue
        model.set_submodule(path, made.eval())
        swapped += 1
    if swapped:
        chosen("quantization", f"{swapped} more linears", "not in fused layers")


def _role(path: str) -> Role:
    name = path.rpartition(".")[2]
    return next((role for names, role in ROLES if name in names), "other")
