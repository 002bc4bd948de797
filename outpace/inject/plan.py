"""The plan of an injection, checked in full before anything is changed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from outpace.errors import ModelError, NotSupported
from outpace.inject.modules import FusedLayer
from outpace.inject.parts import Parts
from outpace.inject.policy import LayerSettings, Policy
from outpace.kernels.activation import activation_kind


@dataclass(frozen=True)
class PlannedLayer:
    """A layer with its policy, and the numbers of the fused layer that replaces it."""

    path: str
    layer: nn.Module
    policy: Policy
    settings: LayerSettings


@dataclass(frozen=True)
class Plan:
    """All layers to replace; empty: no policy knows this model."""

    config: Any
    """Config of the layers: the model's, or that of its text part."""
    layers: list[PlannedLayer]


def make_plan(model: nn.Module, policies: Mapping[str, Policy], *, experts: bool = True) -> Plan:
    """Find the layers. Raises for what fused layers would lose or compute wrong. experts: False keeps experts."""
    if any(isinstance(module, FusedLayer) for module in model.modules()):
        raise ModelError("model: its layers are fused already; use the engine that fused them, or load the model anew")
    config = config_of(model)
    found = [(path, module) for path, module in model.named_modules() if _policy_of(type(module), policies) is not None]
    _check_sharing(model, [layer for _, layer in found])
    kinds = {kind: _resolved(model, config, kind, policies) for kind in {type(layer) for _, layer in found}}
    layers = []
    for index, (path, layer) in enumerate(found):
        policy = _of_layer(kinds[type(layer)], layer, experts)
        planned = PlannedLayer(path, layer, policy, policy.settings(config, index))
        _check(planned)
        layers.append(planned)
    return Plan(config, layers)


def foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks other than ours and Hugging Face's own, which record outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    known = ("transformers.", "outpace.inject.staged")
    return any(not (getattr(hook, "__module__", None) or "").startswith(known) for hook in hooks)


def _check(planned: PlannedLayer) -> None:
    """Every role must be a module that the fused layer can compute, without hooks."""
    policy, layer = planned.policy, planned.layer
    part = Parts(layer)
    for path in _roles(policy):
        module = part(path)
        if not _is_stock(type(module), type(layer)):
            kind = type(module)
            raise ModelError(
                f"injection: {planned.path}.{path} is a {kind.__module__}.{kind.__name__}, whose computation would be "
                "lost; merge adapters into the weights first, or leave kernel injection off"
            )
    kept = () if policy.mlp is None else tuple(part(policy.mlp).modules())
    for path, module in layer.named_modules():
        if module is not layer and not any(module is other for other in kept) and foreign_hooks(module):
            raise ModelError(f"injection: {planned.path}.{path} has a hook, which a fused layer never calls; remove it")
    if policy.mlp is None:
        activation_kind(planned.settings.activation)  # raises for an unknown one now, not in the first forward


def _roles(policy: Policy) -> Iterator[str]:
    linears = (policy.qkv, policy.out, policy.up, policy.down)
    norms = (policy.attn_norm, policy.mlp_norm, policy.attn_out_norm, policy.mlp_out_norm, policy.q_norm, policy.k_norm)
    moe = policy.moe
    mixture = () if moe is None else (moe.router, moe.experts, moe.shared, moe.shared_gate, moe.coefficient)
    for role in (*linears, *norms, *mixture):
        if role is not None:
            yield from (role,) if isinstance(role, str) else role


def _of_layer(policy: Policy, layer: nn.Module, experts: bool) -> Policy:
    """The policy of one layer: in families with experts, some layers have none."""
    moe, part = policy.moe, Parts(layer)
    if moe is None:
        return policy
    if part.optional(moe.experts) is None:
        if policy.up is None:
            raise part.missing(moe.experts)
        return replace(policy, moe=None)
    if experts:
        return replace(policy, up=None, down=None)
    if moe.shared is not None and not moe.shared.startswith(f"{moe.block}."):
        raise NotSupported(f"moe.enabled=False: {type(layer).__name__} cannot keep its own experts; remove it")
    return replace(policy, up=None, down=None, moe=None, mlp=moe.block)


def _is_stock(kind: type[nn.Module], layer: type[nn.Module]) -> bool:
    """Whether a class comes from torch, from transformers, or from the package of the layer."""
    roots = {"torch", "transformers", layer.__module__.partition(".")[0]}
    return kind.__module__.partition(".")[0] in roots


def _check_sharing(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raise for layers or weights that are used in two places: injection would replace one of them."""
    places = [module for _, module in model.named_modules(remove_duplicate=False)]
    if any(sum(place is layer for place in places) > 1 for layer in layers):
        raise ModelError("injection: a layer of the model is used in two places; leave kernel injection off")
    owners: dict[int, nn.Module] = {}
    for layer in layers:
        for parameter in layer.parameters():
            if owners.setdefault(id(parameter), layer) is not layer:
                raise ModelError("injection: two layers of the model share weights; leave kernel injection off")


def _resolved(model: nn.Module, config: Any, kind: type[nn.Module], policies: Mapping[str, Policy]) -> Policy:
    """The policy of a class of layers for this config. Raises if the config cannot be run right."""
    family = _policy_of(kind, policies)
    assert family is not None, "the layers were found by their policy"
    if reason := family.refuses(config):
        raise NotSupported(f"injection: {type(model).__name__} {reason}")
    return family.of(config)


def _policy_of(kind: type[nn.Module], policies: Mapping[str, Policy]) -> Policy | None:
    """The policy of a class. One whose name includes the module wins over one with the class name alone."""
    return policies.get(f"{kind.__module__}.{kind.__name__}") or policies.get(kind.__name__)


def config_of(model: nn.Module) -> Any:
    """The config of the layers: of the model, or of its text part."""
    config: Any = getattr(model, "config", None)
    text: Callable[[], Any] | None = getattr(config, "get_text_config", None)
    return text() if callable(text) else config
