"""Plans what injection does to a model, as the config asks: fused layers by a policy, or the model's own layers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from outpace.config import InferenceConfig, LLMConfig
from outpace.errors import ConfigError, NotSupported
from outpace.inject.apply import Injected, build, inject
from outpace.inject.interface import Interface
from outpace.inject.make import Maker
from outpace.inject.mixtures import (
    FoundMixture,
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
"""Makes the paged form of a model, for sequences of at most this many tokens."""


class Injection(Protocol):
    """A planned change of a model. The plan has been checked as far as possible without making anything."""

    def check(self, make: Maker) -> None:
        """Make what `apply` will insert, and drop it. Raises if rules for weights cannot be followed."""

    def apply(self) -> None:
        """Change the model."""

    def paged(self) -> Paged | None:
        """The paged form of the model; None: it has none. Call it when the model is on its device."""

    def has_pages(self, max_positions: int) -> bool:
        """Whether it has a paged form. Call it before `apply`. Raises if the form cannot hold this many tokens."""

    def varies(self) -> str | None:
        """Why its paged results may depend on the other requests of a batch; None: they do not."""


class Fused:
    """Level 1: a model with fused layers."""

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
        """Make the fused layers, and drop them."""
        build(self._model, self._plan, self._kernels, make)

    def apply(self) -> None:
        self._injected = inject(self._model, self._plan, self._kernels, self._rules, self._shard)

    def paged(self) -> Paged | None:
        """The fused layers over pages."""
        assert self._injected is not None, "apply comes first"
        if self._injected.policy.model is None:
            return None
        here = {id(module) for module in self._model.modules()}
        layers = [layer for layer in self._injected.layers if id(layer) in here]  # the others are in other stages
        return functools.partial(PagedModel, self._model, replace(self._injected, layers=layers))

    def has_pages(self, max_positions: int) -> bool:
        policy = self._plan.layers[0].policy
        return policy.model is not None and bool(check_paged(self._model, policy, self._plan.config, max_positions))

    def varies(self) -> str | None:
        policies = [item.policy for item in self._plan.layers]
        if any(policy.mlp is not None for policy in policies):
            return "its layers keep their own MLP"
        roles, part = policies[0].model, Parts(self._model)
        own = () if roles is None else (roles.project_in, roles.project_out)
        return "it keeps projections of its own" if any(part.optional(path) is not None for path in own) else None


@dataclass(frozen=True)
class Partly:
    """A model in which some modules are replaced: mixtures of experts, or modules cut over ranks.

    inner: what injection does to the rest; None: nothing.
    """

    model: nn.Module
    kernels: Kernels
    rules: Rules
    shard: Shard | None
    inner: Injection | None
    mixtures: Sequence[FoundMixture] = ()
    cuts: RankPlan | None = None
    """The modules of which this rank has a part; None: it has all of each."""

    def check(self, make: Maker) -> None:
        """Make the mixtures and the rest, and drop them."""
        make_mixtures(self.mixtures, make)
        if self.inner is not None:
            self.inner.check(make)

    def apply(self) -> None:
        if self.mixtures:
            replace_mixtures(self.model, self.mixtures, self.kernels, self.rules, self.shard)
        if self.cuts is not None:
            put_in(self.model, self.cuts, Maker(self.model, self.kernels, self.rules, self.shard))
        if self.inner is not None:
            self.inner.apply()

    def paged(self) -> Paged | None:
        """The rest over pages. Without a paged form, a cut model is called once as a check."""
        if self.inner is not None:
            return self.inner.paged()
        if self.cuts is not None:
            try_out(self.model)
        return None

    def has_pages(self, max_positions: int) -> bool:
        return self.inner is not None and self.inner.has_pages(max_positions)

    def varies(self) -> str | None:
        return None if self.inner is None else self.inner.varies()


def plan_injection(
    model: nn.Module, config: InferenceConfig, kernels: Kernels, rules: Rules = KEEP, mesh: Mesh = NO_MESH
) -> Injection | None:
    """Fused layers if a policy knows them, else the model's own layers over pages; None: no injection was asked for."""
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
        raise ConfigError(f"triangular_masking=False: {type(model).__name__} is a causal model; remove it")
    if not plan.layers and mesh is not NO_MESH:
        return _over_ranks(model, config, kernels, rules, mesh, reduced, found, level_0=True)
    shard = None
    if plan.layers:
        shard = _shard_of(model, mesh, config, policies, found, plan)
        if reduced and shard is not None:
            raise ConfigError("injection_policy: over ranks, give either policies or names of linears, not both")
        inner: Injection | None = Fused(model, plan, kernels, rules, shard)
    else:
        inner = _level_0(model, kernels, config, needed=not found)
    return Partly(model, kernels, rules, shard, inner, found) if found else inner


def check_split(model: nn.Module, config: InferenceConfig) -> None:
    """Raise if a policy knows this model's layers and they cannot be divided among so many ranks."""
    size, grain = config.tensor_parallel.tp_size, config.tensor_parallel.tp_grain_size
    if size == 1 or config.injection_policy or not make_plan(model, by_class()).layers:
        return
    try:
        split_model(model, size, grain=grain)
    except NotSupported as error:
        raise ConfigError(f"tensor_parallel_size={size}: {error}") from None


def _shard_of(
    model: nn.Module,
    mesh: Mesh,
    config: InferenceConfig,
    policies: Mapping[str, Policy],
    found: Sequence[FoundMixture],
    plan: Plan,
) -> Shard | None:
    """This rank's part of a model with fused layers, and of other mixtures in it; None: there is one rank."""
    if mesh is NO_MESH:
        return None
    splits = split_model(model, mesh.tp.size, policies or None, grain=config.tensor_parallel.tp_grain_size)
    splits = {**splits, **dict(split_mixtures(found, mesh.tp.size, experts=mesh.ep.size == 1))}
    kept = [f"{item.path}.{item.policy.mlp}." for item in plan.layers if item.policy.mlp is not None]
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
    found: Sequence[FoundMixture],
    *,
    level_0: bool,
) -> Injection:
    """The injection of a model that keeps its own layers, over ranks. level_0: attention runs over pages."""
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
    return Partly(model, kernels, rules, shard, inner, found, plan)


def _check_shared(model: nn.Module, splits: Splits, config: InferenceConfig) -> None:
    """Raise if every rank would run the whole model."""
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
    """Level 0; None: the model cannot run on it. needed: raise instead."""
    ranks, stage = (ALONE, ONLY) if shard is None else (shard.ranks, shard.mesh.stage)
    try:
        return Interface(model, kernels, experts=config.moe.enabled, ranks=ranks, stage=stage)
    except NotSupported:
        if needed:
            raise
        return None


def _own(policies: Mapping[Any, Any]) -> dict[type[nn.Module], Policy]:
    """The caller's full policies. Raises for a value that is neither a policy nor names of linears."""
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
    """DeepSpeed's form: names of the linears whose outputs are summed over ranks. One rank only checks that they exist.

    A name is the end of a path. Some layers may lack one: only the decoder of T5 has `EncDecAttention.o`.
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
