"""How each tensor of a model is cut over ranks, by its policy or by Hugging Face's plan."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from outpace.errors import ConfigError, ModelError, NotSupported
from outpace.inject.parts import Parts
from outpace.inject.plan import Plan, PlannedLayer, make_plan
from outpace.inject.policies import by_class
from outpace.inject.policy import ModelRoles, Policy
from outpace.parallel.spans import LAYOUTS, Spans, Split, even_split, scaled, split_heads

Splits = Mapping[str, Split | None]
"""By names of the state dict; None: whole on every rank."""
Named = Iterator[tuple[str, Split | None]]

ROUTERS = ("gate", "router", "shared_expert_gate")
_EXPERT_ROLES: Mapping[str, str] = {
    "gate_proj": "up", "up_proj": "up", "gate_up_proj": "gate_up", "input_linear": "gate_up", "down_proj": "down",
    "output_linear": "down",
}  # fmt: skip
"""Role of a linear of an expert, by its name."""
_STYLES: Mapping[str, str | None] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), "column"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), "row"),
    "packed_colwise": "packed column",
    "packed_rowwise": "packed row",
    "embedding_rowwise": "first",
    "embedding_colwise": "row",
    **dict.fromkeys(
        ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "mla_kv_a_proj",
         "moe_tp_experts", "moe_identity_expert"),
    ),
}  # fmt: skip
"""How Hugging Face's styles cut a weight; None: it stays whole."""
_BY_HEADS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value")
"""Linears whose outputs are heads."""


def split_model(
    model: nn.Module, ranks: int, policies: Mapping[str, Policy] | None = None, *, grain: int = 1
) -> Splits:
    """How each tensor of a model's state dict is cut over the ranks; the model may be on the meta device.

    grain: parts of MLP and head are multiples of it, if they are large enough. A part of a fused qkv has the layout of
    the whole, with the rank's heads (with "quarters", if ranks divide 4).
    """
    if ranks < 1:
        raise ConfigError(f"tensor parallelism: expected at least one rank, got {ranks}")
    tensors = model.state_dict(keep_vars=True)
    found: dict[str, Split | None] = dict.fromkeys(tensors)
    if ranks == 1:
        return found
    plan = make_plan(model, by_class() if policies is None else policies)
    named = _by_policy(model, plan, ranks, grain) if plan.layers else _by_hugging_face(model, plan.config, ranks)
    for name, split in named:
        if name in tensors:  # a linear may have no bias, and a model no head
            found[name] = split
            _check(name, tensors[name], split)
    return found


def known_splits(model: nn.Module, ranks: int) -> Splits:
    """`split_model`; empty for a model without a policy or plan."""
    try:
        return split_model(model, ranks)
    except (ConfigError, ModelError, NotSupported):
        return {}


def _check(name: str, tensor: Tensor, split: Split | None) -> None:
    """Raise if the policy or the config does not fit the tensor."""
    if split is None:
        return
    size, stop = tensor.shape[split.dim], max(spans[-1][1] for spans in split.spans)
    if stop != size:
        raise ModelError(
            f"tensor parallelism: {name} has size {size} in dimension {split.dim}, and its heads need {stop}"
        )


def _by_policy(model: nn.Module, plan: Plan, ranks: int, grain: int) -> Named:
    for item in plan.layers:
        for name, split in _layer(item, ranks, grain):
            yield f"{item.path}.{name}", split
    roles = plan.layers[0].policy.model
    if roles is not None:
        yield from _vocabulary(Parts(model), roles, ranks, grain)


def _vocabulary(part: Parts, roles: ModelRoles, ranks: int, grain: int) -> Named:
    for path in (roles.embed, roles.head):
        module = part.optional(path)
        if module is not None:
            split = even_split(0, _weight(module, path).shape[0], ranks, f"the rows of {path}", grain=grain)
            yield from _linear(path, 0, split.spans)


def _layer(item: PlannedLayer, ranks: int, grain: int) -> Named:
    policy, settings, part = item.policy, item.settings, Parts(item.layer)
    column, row = (1, 0) if policy.transposed else (0, 1)
    heads = split_heads(settings.num_heads, settings.num_kv_heads, ranks)
    query = tuple(scaled([each.query], settings.head_dim) for each in heads)
    kv = tuple(scaled([each.kv], settings.head_dim) for each in heads)
    if isinstance(policy.qkv, str):
        units = [LAYOUTS[policy.qkv_layout](each, settings.num_heads, settings.num_kv_heads) for each in heads]
        yield from _linear(policy.qkv, column, tuple(scaled(each, settings.head_dim) for each in units))
    else:
        for path, spans in zip(policy.qkv, (query, kv, kv), strict=True):
            yield from _linear(path, column, spans)
    yield f"{policy.out}.weight", Split(row, query)
    yield from _norms(item, part, query, kv)
    if policy.sinks is not None:
        yield policy.sinks, Split(0, tuple((each.query,) for each in heads))
    if policy.up is not None:
        assert policy.down is not None, "a policy that names one names both"
        what = f"the intermediate size of {policy.down}"
        yield from split_mlp(
            part, policy.up, policy.down, ranks, what, gated=policy.gated, transposed=policy.transposed, grain=grain
        )
    for path in _blocks(policy):
        for name, split in _experts(part(path), f"{item.path}.{path}", ranks, _own_roles(policy)):
            yield f"{path}.{name}", split


def _blocks(policy: Policy) -> Iterator[str]:
    """The modules of a layer with experts, or its plain MLP instead."""
    if policy.mlp is not None:
        yield policy.mlp
    if policy.moe is not None:
        yield policy.moe.block
        if policy.moe.shared is not None and not policy.moe.shared.startswith(f"{policy.moe.block}."):
            yield policy.moe.shared


def _own_roles(policy: Policy) -> Mapping[str, str]:
    """Role of each part of a mixture, by the names of its policy."""
    moe = policy.moe
    if moe is None:
        return {}
    whole = (path for path in (moe.router, moe.shared_gate, moe.coefficient) if path is not None)
    ups, up = ((moe.up,), "gate_up" if moe.gated else "up") if isinstance(moe.up, str) else (moe.up, "up")
    return {_last(path): "router" for path in whole} | {_last(path): up for path in ups} | {_last(moe.down): "down"}


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def split_mlp(
    part: Parts,
    up: str | tuple[str, str],
    down: str,
    ranks: int,
    what: str,
    *,
    gated: bool,
    transposed: bool = False,
    grain: int = 1,
) -> Named:
    """How an MLP is cut along its intermediate size. up, down: as in `Policy`; what: its name in errors."""
    column, row = (1, 0) if transposed else (0, 1)
    size, packed = _weight(part(down), down).shape[row], gated and isinstance(up, str)
    first = even_split(column, 2 * size if packed else size, ranks, what, packed=packed, grain=grain)
    for path in (up,) if isinstance(up, str) else up:
        yield from _linear(path, column, first.spans)
    yield f"{down}.weight", even_split(row, size, ranks, what, grain=grain)


def _linear(path: str, dim: int, spans: tuple[Spans, ...]) -> Named:
    """A linear cut along its outputs, with its bias."""
    yield f"{path}.weight", Split(dim, spans)
    yield f"{path}.bias", Split(0, spans)


def _experts(mlp: nn.Module, where: str, ranks: int, own: Mapping[str, str]) -> Named:
    """A module of experts, or a plain MLP: each is cut along its intermediate size."""
    roles = {**_EXPERT_ROLES, **own}
    for name, tensor in mlp.named_parameters():
        owner, _, leaf = name.rpartition(".")
        stacked = leaf not in ("weight", "bias")
        role = roles.get(leaf.removesuffix("_bias") if stacked else owner.rpartition(".")[2])
        if name.partition(".")[0] in ROUTERS or role == "router" or (role == "down" and leaf.endswith("bias")):
            yield name, None
        elif role is None:
            raise NotSupported(f"tensor parallelism: nothing says how {where}.{name} is split over ranks")
        else:
            stack = mlp.get_submodule(owner) if stacked else None
            transposed = stack is not None and _stored_so(stack, "is_transposed")
            packed = role == "gate_up" and (stack is None or _stored_so(stack, "is_concatenated"))
            dim = -1 if leaf.endswith("bias") or (role == "down") != transposed else -2
            width = 2 if role == "gate_up" and not packed else 1  # gate and up of each index are neighbours
            yield name, _cut(tensor, dim, ranks, f"{where}.{name}", packed=packed, width=width)


def _stored_so(stack: nn.Module, attribute: str) -> bool:
    """An attribute of Hugging Face's stacked experts that tells the layout of their weights."""
    found = getattr(stack, attribute, None)
    if found is None:
        kind = type(stack).__name__
        raise NotSupported(f"tensor parallelism: {kind} does not say the layout of its weights ({attribute})")
    return bool(found)


def _cut(tensor: Tensor, dim: int, ranks: int, what: str, *, packed: bool = False, width: int = 1) -> Split:
    dim %= tensor.dim()
    return even_split(dim, tensor.shape[dim], ranks, f"dimension {dim} of {what}", packed=packed, width=width)


def _norms(item: PlannedLayer, part: Parts, query: tuple[Spans, ...], kv: tuple[Spans, ...]) -> Named:
    """Norms of q and k over all heads together are cut, and computed by all ranks. Norms of single heads are not."""
    for path, spans in ((item.policy.q_norm, query), (item.policy.k_norm, kv)):
        weight = None if path is None else getattr(part(path), "weight", None)
        if not isinstance(weight, Tensor) or weight.numel() == item.settings.head_dim:
            continue
        if item.policy.qk_norm_over != "all" or weight.numel() != spans[-1][-1][1]:
            raise NotSupported(
                f"tensor parallelism: {item.path}.{path} is a norm with {weight.numel()} values and "
                f"{item.settings.head_dim} a head, which cannot be split"
            )
        yield f"{path}.weight", Split(0, spans)


def _weight(module: nn.Module, path: str) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(f"tensor parallelism: {path} ({type(module).__name__}) has no weight of two dimensions")
    return weight


def _by_hugging_face(model: nn.Module, config: Any, ranks: int) -> Named:
    """A model without a policy, by Hugging Face's plan."""
    plan = hugging_face_plan(model)
    if not plan:
        raise NotSupported(
            f"tensor parallelism: nothing says how {type(model).__name__} is split over {ranks} ranks: Outpace has no "
            "policy of it, and Hugging Face no plan (tp_plan)"
        )
    check_heads(model, config, plan, ranks)
    for name, tensor in model.state_dict(keep_vars=True).items():
        style = plan.get(generic(name)) or plan.get(generic(name).rpartition(".")[0])
        if style is not None:
            yield name, _styled(name, tensor, style, ranks)


def hugging_face_plan(model: nn.Module) -> Mapping[str, str]:
    """Hugging Face's plan (tp_plan): styles by paths without numbers; empty: there is none."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    return plan if any("*" in rule for rule in plan) else {}


def generic(path: str) -> str:
    """A path with * for numbers, as in plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def check_heads(model: nn.Module, config: Any, plan: Mapping[str, str], ranks: int) -> None:
    """Raise for a plan that would cut through a head, unless it gathers the heads again."""
    if not any(style == "colwise" and _last(rule) in _BY_HEADS for rule, style in plan.items()):
        return
    for entry in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, entry, None)
        if isinstance(heads, int) and heads % ranks:
            raise NotSupported(
                f"tensor parallelism: {entry}={heads} of {type(model).__name__} does not divide by {ranks} ranks, "
                "which Hugging Face's plan needs"
            )


def split_stack(stack: nn.Module, path: str, ranks: int) -> Named:
    """How stacked experts of Hugging Face are cut over ranks, by the names of the model."""
    for name, split in _experts(stack, path, ranks, {}):
        yield f"{path}.{name}", split


def _styled(name: str, tensor: Tensor, style: str, ranks: int) -> Split | None:
    if style not in _STYLES:
        raise NotSupported(f"tensor parallelism: {name} is split as {style!r}, which Outpace does not know")
    kind = _STYLES[style]
    if kind is None or (tensor.dim() < 2 and kind.endswith("row")):
        return None
    dim = {"first": 0, "column": max(tensor.dim() - 2, 0)}.get(kind.removeprefix("packed "), -1)
    return _cut(tensor, dim, ranks, name, packed=kind.startswith("packed"))
