"""Mixtures of experts without a policy: DeepSpeed's MoE layers, and lists of MLPs beside a router in any model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from outpace.config.sections import MoEConfig
from outpace.errors import ConfigError, NotSupported
from outpace.inject.experts import MixtureOfExperts, OwnMixture
from outpace.inject.make import Maker
from outpace.inject.parts import Parts
from outpace.inject.plan import Plan, foreign_hooks
from outpace.inject.policy import MoERoles
from outpace.inject.prove import ExpertForm, expert_form, linears, routing_of
from outpace.inject.shard import Shard
from outpace.inject.split import Named, split_mlp
from outpace.kernels.dispatch import Kernels
from outpace.kernels.routing import Routing
from outpace.log import chosen
from outpace.quant.rules import KEEP, Rules

_GATE, _EXPERTS = "deepspeed_moe.gate.wg", "deepspeed_moe.experts.deepspeed_experts"

Kind = Literal["standard", "residual"]


@dataclass(frozen=True)
class FoundMixture:
    """A mixture that was found in a model."""

    path: str
    module: nn.Module
    roles: MoERoles
    form: ExpertForm
    num_experts: int
    kind: Kind = "standard"
    returns: Literal["hidden", "logits", "deepspeed"] = "hidden"
    logits_dim: int = 0


def find_mixtures(model: nn.Module, plan: Plan) -> list[FoundMixture]:
    """All mixtures of a model that no policy replaces."""
    shared = _shared(model)
    found: list[FoundMixture] = []
    for path, module in model.named_modules():
        if _inside(path, (each.path for each in found)) or not _free(path, plan):
            continue
        likely = found[-1].form if found else None
        mixture = _of_deepspeed(path, module, likely) or _own(path, module, likely)
        if mixture is None:
            continue
        if not path:
            _kept(path, "they are the model itself, which cannot be replaced")
        elif any(id(parameter) in shared for parameter in module.parameters()):
            _kept(path, "its weights are also used elsewhere")
        elif any(foreign_hooks(each) for each in module.modules()):
            _kept(path, "it has a hook, which a fused one would never call")
        else:
            found.append(mixture)
    return found


def make_mixtures(found: Sequence[FoundMixture], make: Maker) -> list[MixtureOfExperts]:
    """Fused mixtures for those that were found. Does not change the model."""
    return [make.mixture(Parts(each.module), each.roles, None, each.form.act) for each in found]


def split_mixtures(found: Sequence[FoundMixture], ranks: int, *, experts: bool = True) -> Named:
    """How experts and shared MLPs are cut over ranks, by intermediate size. experts: False leaves experts whole."""
    for each in found if ranks > 1 else ():
        roles, form = each.roles, each.form
        paths = [f"{roles.experts}.{number}" for number in range(each.num_experts if experts else 0)]
        for path in (*paths, *(() if roles.shared is None else (roles.shared,))):
            mlp, where = Parts(each.module.get_submodule(path)), f"{each.path}.{path}"
            what = f"the intermediate size of {where}"
            for name, split in split_mlp(mlp, form.up, form.down, ranks, what, gated=form.gated):
                yield f"{where}.{name}", split


def replace_mixtures(
    model: nn.Module, found: Sequence[FoundMixture], kernels: Kernels, rules: Rules = KEEP, shard: Shard | None = None
) -> None:
    """Replace mixtures by fused ones: empty, with recipes."""
    for each, mixture in zip(found, make_mixtures(found, Maker(model, kernels, rules, shard)), strict=True):
        model.set_submodule(each.path, _standing_in(each, mixture))
    kinds = ", ".join(dict.fromkeys(type(each.module).__name__ for each in found))
    chosen("experts", f"{len(found)} fused mixtures of {kinds}", "no token is dropped: capacities are for training")


def check_asked(asked: MoEConfig, model: nn.Module, plan: Plan, found: Sequence[FoundMixture]) -> None:
    """Raise if the config contradicts the model about experts."""
    name, kinds = type(model).__name__, {each.kind for each in found} or {"standard"}
    counts = list(_counts(model, plan, found))
    if (asked.ep_size > 1 or asked.ep_group is not None) and not counts:
        raise ConfigError(f"moe.ep_size: {name} has no experts to distribute; leave it at 1")
    if asked.moe_experts != (1,):
        wanted = asked.moe_experts * len(counts) if len(asked.moe_experts) == 1 else asked.moe_experts
        if not counts or tuple(counts) != wanted:
            there = f"has {counts} experts in its expert layers" if counts else "has no expert layers"
            raise ConfigError(f"moe.moe_experts: {list(asked.moe_experts)} was given, and {name} {there}; remove it")
    if (asked.type == "residual" and not counts) or ("type" in asked.model_fields_set and {asked.type} != kinds):
        there = f"has {' and '.join(sorted(kinds))} experts" if counts else "has no expert layers"
        raise ConfigError(f"moe.type: {asked.type!r} was given, and {name} {there}; remove it")


def _counts(model: nn.Module, plan: Plan, found: Sequence[FoundMixture]) -> Iterator[int]:
    """Number of experts of each layer with experts, in order."""
    planned = {item.path: Parts(item.layer)(moe.router) for item in plan.layers if (moe := item.policy.moe) is not None}
    own = {each.path: each.num_experts for each in found}
    for path, module in model.named_modules():
        weight = getattr(planned.get(path), "weight", None)
        stack = getattr(module, "num_experts", None) if hasattr(module, "is_concatenated") and not plan.layers else None
        count = own.get(path) or (None if weight is None else len(weight)) or stack
        if isinstance(count, int):
            yield count


def _of_deepspeed(path: str, module: nn.Module, likely: ExpertForm | None) -> FoundMixture | None:
    """`deepspeed.moe.layer.MoE`, by the names of its parts: a gate `wg`, experts, perhaps a dense MLP."""
    part = Parts(module)
    gate, experts = part.optional(_GATE), part.optional(_EXPERTS)
    if not isinstance(gate, nn.Linear) or not isinstance(experts, nn.ModuleList):
        return None
    if gate.out_features != len(experts):
        raise NotSupported(
            f"injection: {path} has {len(experts)} of {gate.out_features} experts; the others are on other ranks; give "
            "every rank the module with all experts (moe.ep_size distributes them), or leave kernel injection off"
        )
    form = expert_form(experts[0], gate.in_features, likely)
    if form is None:
        return _kept(path, "its experts are not a known kind of MLP")
    owner: Any = part(_GATE.rpartition(".")[0])
    top_k = int(getattr(owner, "k", 1))
    residual = part.optional("coefficient") is not None
    roles = _roles(_GATE, _EXPERTS, form, Routing(top_k=top_k, renormalise=top_k > 1), in_float32=True)
    if residual:
        roles = replace(roles, shared="mlp", shared_up=form.up, shared_down=form.down, coefficient="coefficient")
    return FoundMixture(path, module, roles, form, len(experts), "residual" if residual else "standard", "deepspeed")


def _own(path: str, module: nn.Module, likely: ExpertForm | None) -> FoundMixture | None:
    """A list of MLPs of one class, a linear with one output for each, and no other weights."""
    for name, experts in module.named_children():
        kinds = {type(each) for each in experts.children()}
        if not isinstance(experts, nn.ModuleList) or len(experts) < 2 or len(kinds) > 1 or linears(experts[0]) is None:
            continue
        others = [(at, each) for at, each in module.named_modules() if not f"{at}.".startswith(f"{name}.")]
        gates = [(at, each) for at, each in others if type(each) is nn.Linear and each.out_features == len(experts)]
        if len(gates) != 1:
            continue
        (gate_path, gate), held = gates[0], sum(1 for _ in experts.parameters())
        if len(list(module.parameters())) != held + len(list(gate.parameters())):
            return _kept(path, "it has weights that belong neither to its router nor to its experts")
        form = expert_form(experts[0], gate.in_features, likely)
        if form is None:
            return _kept(path, "its experts are not a known kind of MLP")
        proven = routing_of(module, gate, list(experts))
        if isinstance(proven, str):
            return _kept(path, proven)
        chosen(f"experts of {path}", f"fused: {proven.routing}, {form}", "its own results are the same")
        roles, dim = _roles(gate_path, name, form, proven.routing), proven.logits_dim
        returns: Literal["hidden", "logits"] = "logits" if dim else "hidden"
        return FoundMixture(path, module, roles, form, len(experts), returns=returns, logits_dim=dim)
    return None


def _roles(gate: str, experts: str, form: ExpertForm, routing: Routing, *, in_float32: bool = False) -> MoERoles:
    return MoERoles(
        block="", router=gate, experts=experts, up=form.up, down=form.down, gated=form.gated,
        routing=lambda config: routing, in_float32=in_float32,
    )  # fmt: skip


def _standing_in(found: FoundMixture, mixture: MixtureOfExperts) -> nn.Module:
    kind = type(found.module)
    made: type[OwnMixture] = type(f"Fused{kind.__name__}", (OwnMixture, kind), {"forward": OwnMixture.forward})
    stands = made(mixture, found.returns, found.logits_dim)
    for name, value in vars(found.module).items():
        if not name.startswith("_"):
            stands.__dict__.setdefault(name, value)
    return stands.eval()


def _kept(path: str, reason: str) -> FoundMixture | None:
    """Log why experts are kept; returns None."""
    chosen(f"experts of {path or 'the model'}", "left as they are", reason)
    return None


def _free(path: str, plan: Plan) -> bool:
    """Whether no fused layer replaces the module at this path."""
    for item in plan.layers:
        if _inside(path, (item.path,)):
            return item.policy.mlp is not None and _inside(path, (f"{item.path}.{item.policy.mlp}",))
    return True


def _inside(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _shared(model: nn.Module) -> set[int]:
    """Ids of parameters that are used in two places."""
    seen: set[int] = set()
    twice: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice
