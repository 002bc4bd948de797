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
from outpace.inject.mixtures import Found, check_asked, find_mixtures, make_mixtures, replace_mixtures
from outpace.inject.paged import BatchModel, PagedModel, check_paged
from outpace.inject.parts import Parts
from outpace.inject.plan import Plan, make_plan
from outpace.inject.policies import by_class
from outpace.inject.policy import Policy
from outpace.inject.shard import Shard
from outpace.inject.split import split_model
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen
from outpace.parallel.mesh import NO_MESH, Mesh
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
        return functools.partial(PagedModel, self._model, self._injected)

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


class WithMixtures:
    """A model whose mixtures of experts are fused, and whatever else injection makes of it."""

    def __init__(
        self, model: nn.Module, found: Sequence[Found], kernels: Kernels, rules: Rules, inner: Injection | None
    ) -> None:
        self._model = model
        self._found = found
        self._kernels = kernels
        self._rules = rules
        self._inner = inner

    def check(self, make: Maker) -> None:
        """Make the mixtures and the rest, and let go of them."""
        make_mixtures(self._found, make)
        if self._inner is not None:
            self._inner.check(make)

    def apply(self) -> None:
        """Put the mixtures in, then the rest."""
        replace_mixtures(self._model, self._found, self._kernels, self._rules)
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


def plan_injection(
    model: nn.Module, config: InferenceConfig, kernels: Kernels, rules: Rules = KEEP, mesh: Mesh = NO_MESH
) -> Injection | None:
    """Fused layers where a policy knows them, else the model's own over pages; None: nothing was asked for."""
    mine = config.injection_policy or {}
    policies = {kind.__name__: replace(policy, layers=(kind.__name__,)) for kind, policy in _own(mine).items()}
    _check_reduced(model, mine)
    for name in policies:
        if not any(type(module).__name__ == name for module in model.modules()):
            raise ConfigError(f"injection_policy: {type(model).__name__} has no layer of class {name}")
    if not config.replace_with_kernel_inject and not policies:
        return None
    plan = make_plan(model, policies or by_class(), experts=config.moe.enabled)
    found = find_mixtures(model, plan) if config.moe.enabled else []
    check_asked(config.moe, model, plan, found)
    if not config.triangular_masking and all(item.policy.causal for item in plan.layers):
        raise ConfigError(f"triangular_masking=False: {type(model).__name__} is a causal model; leave it out")
    if plan.layers:
        inner: Injection | None = Fused(model, plan, kernels, rules, shard_of(model, mesh, config, policies))
    else:
        inner = _level_0(model, kernels, config, needed=not found)
    return WithMixtures(model, found, kernels, rules, inner) if found else inner


def shard_of(
    model: nn.Module, mesh: Mesh, config: InferenceConfig, policies: Mapping[str, Policy] | None = None
) -> Shard | None:
    """What this rank has of a model; None: all."""
    if mesh is NO_MESH:
        return None
    splits = split_model(model, mesh.tp.size, policies or None, grain=config.tensor_parallel.tp_grain_size)
    sliced = config.moe.ep_mp_group is not None
    experts = split_model(model, mesh.expert_tp.size, policies or None) if sliced else {}
    same = isinstance(config, LLMConfig) or mesh.experts_like_layers
    return Shard(mesh, splits, same, experts)


def _level_0(model: nn.Module, kernels: Kernels, config: InferenceConfig, *, needed: bool) -> Interface | None:
    """None: the model cannot run so, and need not."""
    try:
        return Interface(model, kernels, experts=config.moe.enabled)
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


def _check_reduced(model: nn.Module, policies: Mapping[Any, Any]) -> None:
    """DeepSpeed's form names the linears whose output ranks add up: each must be there, and one rank adds nothing.

    Names are ends of paths, and some layers may lack one: only the decoder of T5 has `EncDecAttention.o`.
    """
    for kind, value in policies.items():
        if isinstance(value, Policy):
            continue
        layers = [Parts(module) for module in model.modules() if isinstance(module, kind)]
        if not layers:
            raise ConfigError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        for name in _names(value):
            if not any(layer.ending_in(name) for layer in layers):
                raise layers[0].missing(name)
        chosen(f"injection_policy of {kind.__name__}", "checked", "there is one rank, so nothing is reduced")


def _names(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, tuple | list) else (None,)
