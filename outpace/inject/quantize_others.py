"""Quantized linears in the place of those that injection leaves alone: of plain modules, encoders, level 0."""

from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from outpace.errors import ConfigError, ModelError, NotSupportedYet
from outpace.inject.apply import refuse_to_save, stand_in
from outpace.inject.make import Maker
from outpace.inject.quantized import PackedLinear
from outpace.inject.start import Injection
from outpace.kernels.dispatch import Kernels
from outpace.quant.rules import KEEP, Role, Rules

ROLES: tuple[tuple[tuple[str, ...], Role], ...] = (
    (("lm_head", "embed_out", "output_projection", "decoder", "vocab_projector"), "head"),
    (("gate", "router"), "router"),
    (("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query", "key", "value", "query_key_value"), "qkv"),
    (("q_lin", "k_lin", "v_lin", "query_proj", "key_proj", "value_proj", "q", "k", "v", "Wqkv", "qkv_proj"), "qkv"),
)
"""What the last name of a linear says of its part."""


def check_rules(model: nn.Module, injection: Injection | None, kernels: Kernels, rules: Rules) -> None:
    """Raise if a rule cannot be followed, or if nothing follows it. Nothing is changed."""
    if rules is KEEP:
        return
    make = Maker(model, kernels, rules)
    if injection is not None:
        injection.check(make)
    for path, module in _linears(model):
        if f"{path}.weight" not in make.schemes:
            _quantized(make, path, module)
    if not rules.qkv and "qkv" not in make.roles:
        raise ConfigError(
            f"quant.qkv: no linear of {type(model).__name__} is known by its name to compute queries, keys or values; "
            "leave it out, or name the linears that shall be quantized in quant.weight.post_init_quant"
        )
    _check_experts(model, make, rules)
    for key in rules.named:
        if not any(key in name for name in make.schemes):
            some = ", ".join(list(make.schemes)[:3])
            raise ConfigError(
                f"quant.weight.post_init_quant: {key!r} is in the name of no linear of {type(model).__name__}, whose "
                f"names are like {some or 'nothing: it has none'}; correct it, or remove it"
            )
    if not any(scheme is not None for scheme in make.schemes.values()):
        if any(isinstance(module, PackedLinear) for module in model.modules()):
            raise ModelError("model: its linears are quantized already; use the engine that did it, or load it anew")
        raise ConfigError(f"quant: {type(model).__name__} has no linears that could be quantized; remove it")


def _check_experts(model: nn.Module, make: Maker, rules: Rules) -> None:
    """Raise if a rule wants experts that injection leaves alone."""
    for name, parameter in model.named_parameters():
        stacked = parameter.dim() == 3 and "experts" in name.split(".")
        if stacked and name not in make.schemes and rules.of("experts", [name], tuple(parameter.shape)) is not None:
            raise NotSupportedYet("quant", "quantized experts")


def quantize_others(model: nn.Module, kernels: Kernels, rules: Rules) -> None:
    """Swap every linear that is still the model's own, if a rule wants it."""
    if rules is KEEP:
        return
    make = Maker(model, kernels, rules)
    made = [(path, module, _quantized(make, path, module)) for path, module in _linears(model)]
    for path, module, ours in made:
        if ours is not None:
            stand_in(ours, module)
            model.set_submodule(path, ours)
    refuse_to_save(model)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's own, by all their names, but those that it wants in fp32.

    Torch's encoder layer reads the weights of its linears itself.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, module in model.named_modules(remove_duplicate=False):
        if kept & set(path.split(".")):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        if path and type(module) in (nn.Linear, Conv1D) and not isinstance(parent, nn.TransformerEncoderLayer):
            yield path, module


def _quantized(make: Maker, path: str, module: nn.Module) -> nn.Module | None:
    """The module that takes the place of a linear; None: it stays."""
    name = path.rpartition(".")[2]
    role: Role = next((role for names, role in ROLES if name in names), "other")
    made = make.linear([module], role, transposed=type(module) is Conv1D)
    return None if made.recipes["weight"].scheme is None else made.eval()
