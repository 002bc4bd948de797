"""Our experts kernels for Hugging Face's own mixtures: the function that they call, and how they are switched to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from outpace.inject.attention_interface import PAGED, switched
from outpace.inject.policy import MoERoles
from outpace.inject.quantized import StandInExperts
from outpace.kernels.activation import ACTIVATIONS
from outpace.kernels.dispatch import Kernels
from outpace.kernels.routing import Routing
from outpace.log import chosen

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], experts [T, K], weights [T, K]) -> [T, H]."""

_RUNNING: ContextVar[Mapping[int, Run]] = ContextVar("outpace_experts")
"""The functions of the running call, by id of the module."""


@dataclass(frozen=True)
class StackedExperts:
    """All stacked experts of a model, and how our kernels run them."""

    runs: Mapping[int, Run]
    configs: Sequence[Any]
    """The configs that the stacks read."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the stacks use our kernels."""
        token = _RUNNING.set(self.runs)
        try:
            with switched(self.configs, PAGED, "_experts_implementation"):
                yield
        finally:
            _RUNNING.reset(token)


_ATTRIBUTES = ("config", "num_experts", "is_concatenated", "is_transposed", "has_gate", "has_bias")
"""Attributes of Hugging Face's stacked experts."""


def stacked_experts(model: nn.Module, kernels: Kernels) -> StackedExperts | None:
    """The stacked experts of a model; None: it has none, or our kernels cannot run all of them."""
    found: list[Any] = [module for module in model.modules() if is_stack(module)]
    if not found:
        return None
    for module in found:
        if reason := _unknown(module):
            chosen("experts", "the model's own", f"{type(module).__name__} {reason}")
            return None
    chosen("experts", "ours, after the model's own routers", f"{len(found)} stacks of {type(found[0]).__name__}")
    moe.ExpertsInterface.register(PAGED, _experts)
    configs = {id(module.config): module.config for module in found}
    return StackedExperts({id(module): _runner(module, kernels) for module in found}, list(configs.values()))


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _RUNNING.get()[id(module)](hidden_states, top_k_index, top_k_weights)


def is_stack(module: nn.Module) -> bool:
    """Whether a module is stacked experts of Hugging Face, with its own weights."""
    return all(hasattr(module, name) for name in _ATTRIBUTES) and not isinstance(module, StandInExperts)


def _unknown(module: Any) -> str | None:
    if module.is_transposed:
        return "stores its weights as [in, out]"
    if module.has_gate and not module.is_concatenated:
        return "alternates rows of gate and up"
    return computes_otherwise(module)


def computes_otherwise(module: Any) -> str | None:
    """Why our kernels cannot compute this stack, in any layout of its weights; None: they can."""
    if getattr(module, "has_post_expert_norm", False):
        return "has a norm after each expert"
    gate = getattr(type(module), "_apply_gate", None)
    if module.has_gate and gate is not None and gate.__module__ != moe.__name__:
        return "has a gate of its own"
    if getattr(module, "_is_expert_parallel", False):
        return "shares its experts with other ranks"
    return None if act_of(module) else "has an activation that no kernel knows"


def act_of(module: Any) -> str | None:
    """Name of the activation; None: kernels do not know it."""
    own = getattr(module, "act_fn", None)
    same = (name for name in ACTIVATIONS if name in ACT2FN and type(ACT2FN[name]) is type(own))
    return next((name for name in same if repr(ACT2FN[name]) == repr(own)), None)


def stack_roles(module: Any) -> MoERoles:
    """The weights of a stack by name, without a router."""
    return MoERoles(
        block="", router="", experts="", up="gate_up_proj" if module.has_gate else "up_proj", gated=module.has_gate,
        transposed=module.is_transposed, paired=module.has_gate and not module.is_concatenated,
        routing=lambda config: Routing(top_k=1),
    )  # fmt: skip


def _runner(module: Any, kernels: Kernels) -> Run:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    op = partial(kernels.experts, act=act_of(module), gated=bool(module.has_gate))

    def run(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        options = {}
        if module.has_bias:
            options = {"gate_up_bias": getattr(module, f"{up}_bias"), "down_bias": module.down_proj_bias}
        result: Tensor = op(x, getattr(module, up), module.down_proj, weights.float(), experts.int(), **options)
        return result

    return run
