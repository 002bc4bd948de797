"""Injection as the config asks for it: with our policies, with the caller's, or not at all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from outpace.config import InferenceConfig
from outpace.errors import ConfigError, NotSupported
from outpace.inject.apply import Injected, inject
from outpace.inject.parts import Parts
from outpace.inject.policies import by_class
from outpace.inject.policy import Policy
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen


def inject_as_asked(model: nn.Module, config: InferenceConfig, kernels: Kernels) -> Injected | None:
    """Replace the model's layers by fused ones; None: nothing was asked for that replaces them."""
    mine = config.injection_policy or {}
    policies = {kind.__name__: replace(policy, layers=(kind.__name__,)) for kind, policy in _own(mine).items()}
    _check_reduced(model, mine)
    if not config.replace_with_kernel_inject and not policies:
        return None
    injected = inject(model, policies or by_class(), kernels)
    if injected is None:
        names = ", ".join(sorted(policies or by_class()))
        raise NotSupported(
            f"replace_with_kernel_inject: no policy for the layers of {type(model).__name__}; there are policies for "
            f"{names}. Write one (docs/adding-a-model.md), or leave kernel injection off"
        )
    if injected.policy.causal and not config.triangular_masking:
        raise ConfigError(f"triangular_masking=False: {type(model).__name__} is a causal model; leave it out")
    return injected


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
    """DeepSpeed's form names the linears whose output ranks add up: each must be there, and one rank adds nothing."""
    for kind, value in policies.items():
        if isinstance(value, Policy):
            continue
        layers = [module for module in model.modules() if isinstance(module, kind)]
        if not layers:
            raise ConfigError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        for name in _names(value):
            Parts(layers[0])(name)
        chosen(f"injection_policy of {kind.__name__}", "checked", "there is one rank, so nothing is reduced")


def _names(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, tuple | list) else (None,)
