"""Injection as the config asks for it: with our policies, with the caller's, or not at all."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from outpace.config import InferenceConfig, LLMConfig
from outpace.errors import ConfigError, NotSupported
from outpace.inject.apply import Injected, build, inject
from outpace.inject.interface import Interface
from outpace.inject.make import Maker
from outpace.inject.mixtures import (
    Found,
    check_asked,
    find_mixtures,
    make_mixtures,
    replace_mixtures,
    split_mixtures,
)
from outpace.inject.paged import BatchModel, PagedModel, check_paged
from outpace.inject.parts import Parts
from outpace.inject.plan import Plan, make_plan
from outpace.inject.planned import add_stacks, plan_ranks, put_in, report_whole, try_out
from outpace.inject.policies import by_class
from outpace.inject.policy import Policy
from outpace.inject.rank_plan import RankPlan
from outpace.inject.shard import Shard
from outpace.inject.split import Splits, split_model
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen
from outpace.parallel.group import ALONE
from outpace.parallel.mesh import NO_MESH, Mesh
from outpace.parallel.pipeline import ONLY
from outpace.quant.rules import KEEP, Rules

Paged = Callable[[int], BatchModel]
"""Makes a model over pages, for sequences of so many tokens."""


class Injection(Protocol):
    """What injection will make of a model; everything that can be checked beforehand has been."""

    def check(self, make: Maker) -> None:
        """Make what `apply` will put in, and let go of it: what is wrong with rules for weights is said here."""

    def apply(self) -> None:
        """Change the model."""

    def paged(self) -> Paged | None:
        """How the model runs over pages, asked once it is where it runs; None: it has no such form."""

    def has_pages(self, max_positions: int) -> bool:
        """Whether it has such a form, asked before it is changed; raises where it has, but not for so many tokens."""

    def varies(self) -> str | None:
        """Why its results over pages may depend on what shares a batch, though every kernel of ours does not."""


class Fused:
    """A model with fused layers: level 1."""

    def __init__(
        self, model: nn.Module, plan: Plan, kernels: Kernels, rules: Rules, shard: Shard | None = None
    ) -> None:
        self._model = model
        self._plan = plan
        self._kernels = kernels
        self._rules = rules
        self._shard = shard
        self._injected: Injected | None = None

    def check(self, make: Maker) -> None:
        """Make the fused layers, and let go of them."""
        build(self._model, self._plan, self._kernels, make)

    def apply(self) -> None:
        """Put the fused layers in."""
        self._injected = inject(self._model, self._plan, self._kernels, self._rules, self._shard)

    def paged(self) -> Paged | None:
        """The fused layers over pages."""
        assert self._injected is not None, "apply comes first"
        if self._injected.policy.model is None:
            return None
        here = {id(module) for module in self._model.modules()}
        layers = [layer for layer in self._injected.layers if id(layer) in here]  # others are in other stages
        return functools.partial(PagedModel, self._model, replace(self._injected, layers=layers))

    def has_pages(self, max_positions: int) -> bool:
        """Whether the family has such a form."""
        policy = self._plan.layers[0].policy
        return policy.model is not None and bool(check_paged(self._model, policy, self._plan.config, max_positions))

    def varies(self) -> str | None:
        """Parts that stay the model's own."""
        policies = [item.policy for item in self._plan.layers]
        if any(policy.mlp is not None for policy in policies):
            return "its layers keep their own MLP"
        roles, part = policies[0].model, Parts(self._model)
        own = () if roles is None else (roles.project_in, roles.project_out)
        return "it keeps projections of its own" if any(part.optional(path) is not None for path in own) else None


class Within:
    """A model some of whose modules are replaced, and whatever else injection makes of it."""

    def __init__(
        self, model: nn.Module, kernels: Kernels, rules: Rules, shard: Shard | None, inner: Injection | None
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._rules = rules
        self._shard = shard
        self._inner = inner

    def check(self, make: Maker) -> None:
        """Make the rest, and let go of it."""
        if self._inner is not None:
            self._inner.check(make)

    def apply(self) -> None:
        """Change the rest."""
        if self._inner is not None:
            self._inner.apply()

    def paged(self) -> Paged | None:
        """As without them."""
        return None if self._inner is None else self._inner.paged()

    def has_pages(self, max_positions: int) -> bool:
        """As without them."""
        return self._inner is not None and self._inner.has_pages(max_positions)

    def varies(self) -> str | None:
        """As without them."""
        return None if self._inner is None else self._inner.varies()


class WithMixtures(Within):
    """A model whose own mixtures of experts are fused."""

    def __init__(self, found: Sequence[Found], *args: Any) -> None:
        super().__init__(*args)
        self._found = found

    def check(self, make: Maker) -> None:
        """Make the mixtures and the rest, and let go of them."""
        make_mixtures(self._found, make)
        super().check(make)

    def apply(self) -> None:
        """Put the mixtures in, then the rest."""
        replace_mixtures(self._model, self._found, self._kernels, self._rules, self._shard)
        super().apply()


class Planned(Within):
    """A model with its own layers, of whose modules this rank has a part."""

    def __init__(self, plan: RankPlan, *args: Any) -> None:
        super().__init__(*args)
        self._plan = plan

    def apply(self) -> None:
        """Put this rank's parts in, then the rest."""
        put_in(self._model, self._plan, Maker(self._model, self._kernels, self._rules, self._shard))
        super().apply()

    def paged(self) -> Paged | None:
        """As on one rank; a model that has no such form is tried out."""
        if self._inner is None:
            try_out(self._model)
        return super().paged()


def plan_injection(
    model: nn.Module, config: InferenceConfig, kernels: Kernels, rules: Rules = KEEP, mesh: Mesh = NO_MESH
) -> Injection | None:
    """Fused layers where a policy knows them, else the model's own over pages; None: nothing was asked for."""
    mine = config.injection_policy or {}
    policies = {kind.__name__: replace(policy, layers=(kind.__name__,)) for kind, policy in _own(mine).items()}
    reduced = _check_reduced(model, mine, alone=mesh is NO_MESH)
    for name in policies:
        if not any(type(module).__name__ == name for module in model.modules()):
            raise ConfigError(f"injection_policy: {type(model).__name__} has no layer of class {name}")
    if not config.replace_with_kernel_inject and not policies:
        return None if mesh is NO_MESH else _over_ranks(model, config, kernels, rules, mesh, reduced, (), level_0=False)
    plan = make_plan(model, policies or by_class(), experts=config.moe.enabled)
    found = find_mixtures(model, plan) if config.moe.enabled else []
    check_asked(config.moe, model, plan, found)
    if not config.triangular_masking and all(item.policy.causal for item in plan.layers):
        raise ConfigError(f"triangular_masking=False: {type(model).__name__} is a causal model; leave it out")
    if not plan.layers and mesh is not NO_MESH:
        return _over_ranks(model, config, kernels, rules, mesh, reduced, found, level_0=True)
    shard = None
    if plan.layers:
        shard = shard_of(model, mesh, config, policies, found, plan)
        if reduced and shard is not None:
            raise ConfigError(
                "injection_policy: over ranks, give either policies or names of linears, not some of both"
            )
        inner: Injection | None = Fused(model, plan, kernels, rules, shard)
    else:
        inner = _level_0(model, kernels, config, needed=not found)
    return WithMixtures(found, model, kernels, rules, shard, inner) if found else inner


def shard_of(
    model: nn.Module,
    mesh: Mesh,
    config: InferenceConfig,
    policies: Mapping[str, Policy] | None = None,
    found: Sequence[Found] = (),
    plan: Plan | None = None,
) -> Shard | None:
    """What this rank has of a model whose layers a policy knows, and of other mixtures in it; None: all."""
    if mesh is NO_MESH:
        return None
    splits = split_model(model, mesh.tp.size, policies or None, grain=config.tensor_parallel.tp_grain_size)
    splits = {**splits, **dict(split_mixtures(found, mesh.tp.size, experts=mesh.ep.size == 1))}
    kept = [f"{item.path}.{item.policy.mlp}." for item in (plan.layers if plan else ()) if item.policy.mlp is not None]
    splits = {name: None if name.startswith(tuple(kept)) else split for name, split in splits.items()}
    if mesh.tp.size > 1:
        report_whole(model, splits)
    sliced = config.moe.ep_mp_group is not None
    experts = split_model(model, mesh.expert_tp.size, policies or None) if sliced else {}
    own = split_mixtures(found, mesh.expert_tp.size if sliced else 1)
    return _shard(mesh, config, splits, {**experts, **dict(own)})


def _shard(mesh: Mesh, config: InferenceConfig, splits: Splits, experts: Splits) -> Shard:
    same, moe = isinstance(config, LLMConfig) or mesh.experts_like_layers, config.moe
    return Shard(mesh, splits, same, experts, moe.hot_experts, moe.expert_load or ())


def _over_ranks(
    model: nn.Module,
    config: InferenceConfig,
    kernels: Kernels,
    rules: Rules,
    mesh: Mesh,
    reduced: Mapping[type[nn.Module], tuple[str, ...]],
    found: Sequence[Found],
    *,
    level_0: bool,
) -> Injection:
    """A model that keeps its own layers; level_0: they shall attend over pages too."""
    ranks, own = mesh.tp.size, [each.path for each in found]
    if not level_0:
        check_asked(config.moe, model, Plan(None, []), found)
    plan = plan_ranks(model, reduced, ranks, without=own)
    sliced = RankPlan()
    if config.moe.enabled:
        asked = mesh.ep.size > 1
        add_stacks(model, plan, 1 if asked else ranks, asked=asked)
        if config.moe.ep_mp_group is not None:
            add_stacks(model, sliced, mesh.expert_tp.size, asked=asked)
    splits = {**plan.splits, **dict(split_mixtures(found, ranks, experts=mesh.ep.size == 1))}
    if ranks > 1:
        if not plan.stacks and not found:
            _check_shared(model, splits, config)
        report_whole(model, splits, [*plan.stacks, *own])
    own_sliced = split_mixtures(found, mesh.expert_tp.size if config.moe.ep_mp_group is not None else 1)
    shard = _shard(mesh, config, splits, {**sliced.splits, **dict(own_sliced)})
    inner = _level_0(model, kernels, config, needed=not found, shard=shard) if level_0 else None
    made = Planned(plan, model, kernels, rules, shard, inner)
    return WithMixtures(found, model, kernels, rules, shard, made) if found else made


def _check_shared(model: nn.Module, splits: Splits, config: InferenceConfig) -> None:
    """Refuse to run the whole model on every rank."""
    if any(split is not None for split in splits.values()):
        return
    known = not config.replace_with_kernel_inject and make_plan(model, by_class()).layers
    remedy = (
        "set replace_with_kernel_inject=True: Outpace has a policy of its layers"
        if known
        else "name the linears whose outputs are added up, as injection_policy={Layer: ('attention.out', 'mlp.down')}, "
        "or write a policy (docs/adding-a-model.md)"
    )
    raise NotSupported(
        f"tensor_parallel.tp_size: nothing says how {type(model).__name__} is split over ranks, and Hugging Face has "
        f"no plan of it (tp_plan); {remedy}"
    )


def _level_0(
    model: nn.Module, kernels: Kernels, config: InferenceConfig, *, needed: bool, shard: Shard | None = None
) -> Interface | None:
    """None: the model cannot run so, and need not."""
    ranks, stage = (ALONE, ONLY) if shard is None else (shard.ranks, shard.mesh.stage)
    try:
        return Interface(model, kernels, experts=config.moe.enabled, ranks=ranks, stage=stage)
    except NotSupported:
        if needed:
            raise
        return None


def _own(policies: Mapping[Any, Any]) -> dict[type[nn.Module], Policy]:
    """The caller's full policies; what is neither one nor names of linears is refused."""
    for kind, value in policies.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ConfigError(f"injection_policy: keys are classes of layers, got {kind!r}")
        if not isinstance(value, Policy) and not all(isinstance(name, str) for name in _names(value)):
            raise ConfigError(
                f"injection_policy[{kind.__name__}]: expected names of linears or a Policy, got {value!r}"
            )
    return {kind: value for kind, value in policies.items() if isinstance(value, Policy)}


def _check_reduced(
    model: nn.Module, policies: Mapping[Any, Any], *, alone: bool
) -> dict[type[nn.Module], tuple[str, ...]]:
    """DeepSpeed's form names the linears whose output ranks add up: each must be there, and one rank adds nothing.

    Names are ends of paths, and some layers may lack one: only the decoder of T5 has `EncDecAttention.o`.
    """
    found = {}
    for kind, value in policies.items():
        if isinstance(value, Policy):
            continue
        layers = [Parts(module) for module in model.modules() if isinstance(module, kind)]
        if not layers:
            raise ConfigError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        for name in _names(value):
            if not any(layer.ending_in(name) for layer in layers):
                raise layers[0].missing(name)
        found[kind] = _names(value)
        if alone:
            chosen(f"injection_policy of {kind.__name__}", "checked", "there is one rank, so nothing is reduced")
    return found


def _names(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, tuple | list) else (None,)
