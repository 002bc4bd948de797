"""Quantizes the linears and experts that injection does not replace: in plain models, encoders, level 0."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from outpace.errors import ConfigError, NotSupported
from outpace.inject.apply import refuse_to_save, stand_in
from outpace.inject.experts_interface import act_of, computes_otherwise, is_stack, stack_roles
from outpace.inject.injection import Injection
from outpace.inject.linears import is_linear, is_transposed, role_of
from outpace.inject.make import Maker
from outpace.inject.quantized import PackedExperts, StandInExperts
from outpace.inject.recipe import Recipe
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen
from outpace.quant.rules import KEEP, Role, Rules


def check_rules(model: nn.Module, injection: Injection | None, kernels: Kernels, rules: Rules) -> None:
    """Raise if a rule cannot be followed, or applies to nothing. Does not change the model."""
    if rules is KEEP:
        return
    make = _tried(model, injection, kernels, rules)
    if not rules.qkv and "qkv" not in make.roles:
        raise ConfigError(
            f"quant.qkv: no linear of {type(model).__name__} has a name that is known for queries, keys or values; "
            "remove it, or name the linears to quantize in quant.weight.post_init_quant"
        )
    _check_experts(model, make, rules)
    if rules.activates and make.quantized_experts:
        chosen("quantized experts", "activations only in steps of many tokens on a GPU", "few tokens gain nothing")
    if rules.kind not in (None, type(model).__name__):
        raise ConfigError(
            f"quant.plan.model: the plan was made for a {rules.kind}, and this is a {type(model).__name__}; make a "
            "plan for this model with quant.auto"
        )
    for name in rules.exact or ():
        if name not in make.schemes:
            raise ConfigError(
                f"quant.plan: {type(model).__name__} has no linear {name}; make a plan for this model with quant.auto"
            )
    for key in rules.named:
        if not any(key in name for name in make.schemes):
            some = ", ".join(list(make.schemes)[:3])
            raise ConfigError(
                f"quant.weight.post_init_quant: no linear of {type(model).__name__} has {key!r} in its name; "
                f"names are like {some or 'nothing: it has none'}; correct it, or remove it"
            )
    if not any(scheme is not None for scheme in make.schemes.values()) and rules.exact is None:
        raise ConfigError(
            f"quant: {type(model).__name__} has no linears that can be quantized"
            f"{', but is one: put it into an nn.Sequential' if is_linear(model) else '; remove it'}"
        )


def weights_of(
    model: nn.Module, injection: Injection | None, kernels: Kernels
) -> Mapping[tuple[str, ...], tuple[Role, Recipe]]:
    """Role and recipe of each weight that rules may quantize, by the names of its parts. Does not change the model."""
    return _tried(model, injection, kernels, KEEP).weights


def _tried(model: nn.Module, injection: Injection | None, kernels: Kernels, rules: Rules) -> Maker:
    """A maker that has made all modules by the rules once, and dropped them."""
    make = Maker(model, kernels, rules)
    if injection is not None:
        injection.check(make)
    for path, module in _linears(model):
        if f"{path}.weight" not in make.schemes:
            _quantized(make, path, module)
    for path, module in _stacks(model):
        if not any(name.startswith(f"{path}.") for name in make.schemes):
            _quantized_stack(make, path, module)
    return make


def _check_experts(model: nn.Module, make: Maker, rules: Rules) -> None:
    """Raise if a rule applies to experts of an unknown form."""
    for name, parameter in model.named_parameters():
        stacked = parameter.dim() == 3 and "experts" in name.split(".")
        if stacked and name not in make.schemes and rules.of("experts", [name], tuple(parameter.shape)) is not None:
            raise _unable(name, "is a stack of experts that no policy and no interface of Hugging Face knows")


def _unable(what: str, reason: str) -> NotSupported:
    return NotSupported(
        f"quant: {what} {reason}; let kernel_inject=True fuse its experts if a policy knows them, or name only its "
        "other linears in quant.weight.post_init_quant"
    )


def quantize_others(model: nn.Module, make: Maker) -> None:
    """Replace every linear and stack of experts that is still the model's own and that a rule quantizes.

    make: made before injection, which moves modules: it knows weights by their old names.
    """
    if make.rules is KEEP:
        return
    made = [(path, module, _quantized(make, path, module)) for path, module in _linears(model)]
    made += [(path, module, _quantized_stack(make, path, module)) for path, module in _stacks(model)]
    for path, module, ours in made:
        if ours is not None:
            stand_in(ours, module)
            model.set_submodule(path, ours)
    refuse_to_save(model)


def _stacks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The model's own stacked experts, by all their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        if is_stack(module) and not in_fp32(model, path):
            yield path, module


def _quantized_stack(make: Maker, path: str, module: Any) -> nn.Module | None:
    """The replacement of a stack of experts; None: it is kept."""
    experts = make.experts(module, stack_roles(module), None, act_of(module) or "silu")
    if not isinstance(experts, PackedExperts):
        return None
    if reason := computes_otherwise(module):
        raise _unable(f"{path} ({type(module).__name__})", reason)
    return StandInExperts(experts).eval()


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's own linears by all their names, without those in fp32 and those of torch's encoder layer, which
    reads their weights itself."""
    for path, module in model.named_modules(remove_duplicate=False):
        if in_fp32(model, path):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        if path and is_linear(module) and not isinstance(parent, nn.TransformerEncoderLayer):
            yield path, module


def in_fp32(model: nn.Module, path: str) -> bool:
    """Whether the model keeps the module at this path in fp32."""
    return bool(set(getattr(model, "_keep_in_fp32_modules", None) or ()) & set(path.split(".")))


def _quantized(make: Maker, path: str, module: nn.Module) -> nn.Module | None:
    """The replacement of a linear; None: it is kept."""
    made = make.linear([module], role_of(path), transposed=is_transposed(module))
    return None if made.recipes["weight"].scheme is None else made.eval()
