"""Replace the layers of a model by fused ones: build them empty, with recipes for their weights, and swap them in."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from outpace.errors import NotSupported
from outpace.inject.hugging_face import hugging_face_layer
from outpace.inject.make import Maker
from outpace.inject.modules import FusedLayer, Linear, Norm
from outpace.inject.parts import Parts
from outpace.inject.plan import Plan, PlannedLayer
from outpace.inject.policy import LayerSettings, ModelRoles, Policy
from outpace.inject.ranks import SummedLinear, summed_once
from outpace.inject.recipe import RowOrder
from outpace.inject.shard import Shard
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen
from outpace.quant.rules import KEEP, Role, Rules

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class Injected:
    """The result of an injection."""

    policy: Policy
    config: Any
    """Config of the layers: the model's, or that of its text part."""
    layers: list[FusedLayer]
    shard: Shard | None = None
    """This rank's part of them; None: there is one rank."""


Places = list[tuple[str, nn.Module]]
"""New modules by path."""


def build(model: nn.Module, plan: Plan, kernels: Kernels, make: Maker) -> tuple[list[FusedLayer], Places]:
    """Fused layers, embedding and head: all empty, with recipes. Does not change the model."""
    classes = {kind: hugging_face_layer(kind) for kind in dict.fromkeys(type(item.layer) for item in plan.layers)}
    layers = []
    for index, item in enumerate(plan.layers):
        fused = classes[type(item.layer)](item.policy, make.shard.settings(item.settings), index, kernels)
        _build(fused, item, make, plan.config)
        layers.append(fused)
    roles = layers[0].policy.model
    return layers, [] if roles is None else _ends(model, roles, plan.config, make)


def inject(model: nn.Module, plan: Plan, kernels: Kernels, rules: Rules = KEEP, shard: Shard | None = None) -> Injected:
    """Replace the planned layers, the embedding and the head."""
    layers, ends = build(model, plan, kernels, Maker(model, kernels, rules, shard))
    places: Places = [(item.path, fused) for item, fused in zip(plan.layers, layers, strict=True)]
    for path, made in [*places, *ends]:
        model.set_submodule(path, made)
    refuse_to_save(model)
    names = ", ".join(kind.__name__ for kind in dict.fromkeys(type(item.layer) for item in plan.layers))
    chosen("injection", f"level 1: {len(layers)} fused layers", f"policy of {names}")
    return Injected(layers[0].policy, plan.config, layers, shard)


def refuse_to_save(model: nn.Module) -> None:
    """Make the model's methods that do not work with fused weights raise."""
    for name, refuse in (("save_pretrained", _refuse_to_save), ("resize_token_embeddings", _refuse_to_resize)):
        if hasattr(model, name):
            setattr(model, name, refuse)


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise NotSupported(
        "save_pretrained: fused or quantized weights cannot be loaded by their names; save before injection"
    )


def _refuse_to_resize(*args: Any, **kwargs: Any) -> None:
    raise NotSupported(
        "resize_token_embeddings: embedding and head are fused or quantized already; resize before injection"
    )


def _build(fused: FusedLayer, item: PlannedLayer, make: Maker, config: Any) -> None:
    """Give a fused layer its parts: the layer's own norms, linears with recipes, modules that are kept."""
    policy, layer, part = fused.policy, item.layer, Parts(item.layer)

    def norm(path: str | None) -> Norm | None:
        return None if path is None else make.norm(part(path), policy)

    def linear(paths: str | tuple[str, ...], role: Role, order: RowOrder | None = None) -> Linear:
        modules = [part(path) for path in ((paths,) if isinstance(paths, str) else paths)]
        return make.linear(modules, role, transposed=policy.transposed, order=order)

    attn_norm = norm(policy.attn_norm)
    assert attn_norm is not None, "every policy names an attention norm"
    fused.attn_norm, fused.mlp_norm = attn_norm, norm(policy.mlp_norm)
    fused.attn_out_norm, fused.mlp_out_norm = norm(policy.attn_out_norm), norm(policy.mlp_out_norm)
    fused.whole, fused.first_head = item.settings, make.shard.heads(item.settings).query[0]
    for name, path in (("q_norm", policy.q_norm), ("k_norm", policy.k_norm)):
        made = None if path is None else make.head_norm(part(path), policy, item.settings, keys=name == "k_norm")
        setattr(fused, name, made)
    fused.qkv = linear(policy.qkv, "qkv", _order(policy, item.settings))
    fused.out = linear(policy.out, "out")
    fused.up = None if policy.up is None else linear(policy.up, "mlp")
    fused.down = None if policy.down is None else linear(policy.down, "mlp")
    fused.mlp = None if policy.mlp is None else part(policy.mlp)
    fused.mixture = None
    if policy.moe is not None:
        fused.mixture = make.mixture(part, policy.moe, config, item.settings.activation)
        stand_in(fused.mixture.router, part(policy.moe.router))
    fused.sink_values = None if policy.sinks is None else make.values(part.tensor(policy.sinks))
    if isinstance(fused.out, SummedLinear) and isinstance(fused.down, SummedLinear):
        fused.shared_sum = summed_once
    table = None if policy.rotary_table is None else part.tensor(policy.rotary_table).float().chunk(2, dim=-1)
    fused.register_buffer("sin", None if table is None else table[0].contiguous(), persistent=False)
    fused.register_buffer("cos", None if table is None else table[1].contiguous(), persistent=False)
    stand_in(fused, layer)
    fused.eval()


def stand_in(made: nn.Module, module: nn.Module) -> None:
    """Copy hooks and plain attributes from a module to its replacement, where other code may look for them."""
    for name in _HOOKS:  # Hugging Face puts its own there once, when outputs are first recorded
        setattr(made, name, getattr(module, name))
    for name, value in vars(module).items():
        if not name.startswith("_"):
            made.__dict__.setdefault(name, value)


def _order(policy: Policy, settings: LayerSettings) -> RowOrder | None:
    if policy.qkv_layout == "rows":
        return None
    return RowOrder(policy.qkv_layout, settings.num_heads, settings.num_kv_heads, settings.head_dim)


def _ends(model: nn.Module, roles: ModelRoles, config: Any, make: Maker) -> Places:
    """Our embedding and head, which the model calls as before. A model without a head keeps its embedding."""
    part = Parts(model)
    embedding, head = part.optional(roles.embed), part.optional(roles.head)
    if embedding is None or head is None:
        return []
    scale = 1.0 if type(embedding) is nn.Embedding else roles.embed_scale(config)
    made = make.embedding(embedding, scale), make.head(head)
    for ours, module in zip(made, (embedding, head), strict=True):
        stand_in(ours.eval(), module)
    return list(zip((roles.embed, roles.head), made, strict=True))
