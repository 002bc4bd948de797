"""Put fused layers in the place of a model's own: find them, build them from their weights, swap them in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ModelError, NotSupported
from outpace.inject.hugging_face import hugging_face_layer
from outpace.inject.modules import FusedLayer, Linear, Norm
from outpace.inject.parts import Parts
from outpace.inject.plan import Plan
from outpace.inject.policy import Policy, Settings
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen

_EPS_NAMES = ("eps", "variance_epsilon")
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class Injected:
    """What injection did to a model."""

    policy: Policy
    config: Any
    """The config of the part of the model that holds the layers."""
    layers: list[FusedLayer]


def inject(model: nn.Module, plan: Plan, kernels: Kernels) -> Injected:
    """Replace the planned layers by fused ones."""
    classes = {kind: hugging_face_layer(kind) for kind in dict.fromkeys(type(item.layer) for item in plan.layers)}
    layers = []
    for index, item in enumerate(plan.layers):
        fused = classes[type(item.layer)](item.policy, item.settings, index, kernels)
        fill(fused, item.layer)
        model.set_submodule(item.path, fused)
        layers.append(fused)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    names = ", ".join(kind.__name__ for kind in classes)
    chosen("injection", f"level 1: {len(layers)} fused layers", f"policy of {names}")
    return Injected(layers[0].policy, plan.config, layers)


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise NotSupported("save_pretrained: nobody could load fused weights by their names; save before injection")


def fill(fused: FusedLayer, layer: nn.Module) -> None:
    """Give a fused layer the weights of the layer it replaces, which loses them."""
    policy, settings, kernels = fused.policy, fused.settings, fused.kernels
    part = Parts(layer)

    def norm(path: str | None) -> Norm | None:
        return None if path is None else make_norm(part(path), policy, kernels)

    attn_norm = norm(policy.attn_norm)
    assert attn_norm is not None, "every policy names an attention norm"
    fused.attn_norm, fused.mlp_norm = attn_norm, norm(policy.mlp_norm)
    fused.attn_out_norm, fused.mlp_out_norm = norm(policy.attn_out_norm), norm(policy.mlp_out_norm)
    fused.q_norm, fused.k_norm = norm(policy.q_norm), norm(policy.k_norm)
    linear = _Linears(part, policy.transposed, kernels)
    order = _QKV_ORDER[policy.qkv_layout](settings)
    fused.qkv = linear(policy.qkv, order)
    fused.out = linear(policy.out)
    fused.up = None if policy.up is None else linear(policy.up)
    fused.down = None if policy.down is None else linear(policy.down)
    fused.mlp = None if policy.mlp is None else part(policy.mlp)
    fused.sinks = None if policy.sinks is None else part.parameter(policy.sinks)
    table = None if policy.rotary_table is None else part.buffer(policy.rotary_table).float().chunk(2, dim=-1)
    fused.register_buffer("sin", None if table is None else table[0].contiguous(), persistent=False)
    fused.register_buffer("cos", None if table is None else table[1].contiguous(), persistent=False)
    for name in _HOOKS:  # Hugging Face puts its own there once, when outputs are first recorded
        setattr(fused, name, getattr(layer, name))
    for name, value in vars(layer).items():  # plain attributes that the model around it may read
        if not name.startswith("_"):
            fused.__dict__.setdefault(name, value)
    fused.eval()


class _Linears:
    """Linears from the weights of one module or of several together; what they are made from is let go at once."""

    def __init__(self, part: Parts, transposed: bool, kernels: Kernels) -> None:
        self._part = part
        self._transposed = transposed
        self._kernels = kernels

    def __call__(self, paths: str | tuple[str, ...], order: Tensor | None = None) -> Linear:
        modules = [self._part(path) for path in ((paths,) if isinstance(paths, str) else paths)]
        weights = [self._weight(module) for module in modules]
        biases = [_tensor(module, "bias") for module in modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = _joined(biases, weights)
        if order is not None:
            rows = order.to(weight.device)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        for module in modules:
            module._parameters.clear()  # the fused copy is the only one
        return Linear(weight.contiguous(), bias, self._kernels)

    def _weight(self, module: nn.Module) -> Tensor:
        weight = _tensor(module, "weight")
        if weight is None or weight.dim() != 2:
            raise ModelError(f"injection: {type(module).__name__} is not a linear layer with a weight")
        return weight.t() if self._transposed else weight


def _joined(biases: list[Tensor | None], weights: list[Tensor]) -> Tensor | None:
    """One bias for several; a part without has zeros."""
    if all(bias is None for bias in biases):
        return None
    parts = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias
        for bias, weight in zip(biases, weights, strict=True)
    ]
    return torch.cat(parts)


def _heads_order(settings: Settings) -> Tensor:
    """Rows of [heads, (q, k, v), D] as all q, all k, all v."""
    rows = torch.arange(3 * settings.num_heads * settings.head_dim).view(settings.num_heads, 3, settings.head_dim)
    return rows.transpose(0, 1).reshape(-1)


def _groups_order(settings: Settings) -> Tensor:
    """Rows of [groups, (q.., k, v), D] as all q, all k, all v."""
    groups, size = settings.num_kv_heads, settings.num_heads // settings.num_kv_heads
    rows = torch.arange((settings.num_heads + 2 * groups) * settings.head_dim).view(groups, size + 2, settings.head_dim)
    return torch.cat([rows[:, :size].reshape(-1), rows[:, size].reshape(-1), rows[:, size + 1].reshape(-1)])


def _quarters_order(settings: Settings) -> Tensor:
    """Rows of [4, (q.., v.., k..)] as all q, all k, all v."""
    rows = torch.arange(3 * settings.num_heads * settings.head_dim).view(4, 3, -1)
    return rows[:, [0, 2, 1]].transpose(0, 1).reshape(-1)


_QKV_ORDER: dict[str, Callable[[Settings], Tensor | None]] = {
    "rows": lambda settings: None,
    "heads": _heads_order,
    "groups": _groups_order,
    "quarters": _quarters_order,
}


def make_norm(module: nn.Module, policy: Policy, kernels: Kernels) -> Norm:
    """A norm with the weights of the model's own, which it shares."""
    named = (getattr(module, name, None) for name in _EPS_NAMES)
    eps = next((value for value in (policy.norm_eps, *named) if value is not None), None)
    if eps is None:
        raise ModelError(f"injection: {type(module).__name__} does not say its eps")
    return Norm(
        policy.norm,
        _tensor(module, "weight"),
        _tensor(module, "bias"),
        eps,
        kernels,
        offset=policy.norm_offset,
        round_before_weight=policy.round_before_weight,
    )


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value.data if isinstance(value, nn.Parameter) else None
