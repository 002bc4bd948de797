"""The modules of a mixture of experts: router, stacked experts, shared MLP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import NotSupported
from outpace.inject.modules import Linear, Made
from outpace.inject.recipe import Recipe
from outpace.kernels.dispatch import Kernels
from outpace.kernels.few_rows import takes_few_rows
from outpace.kernels.packed import Packed
from outpace.kernels.routing import Routing
from outpace.parallel.group import ALONE, Group


class Router(Made):
    """Chooses the experts of each token, and their weights."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction: nn.Parameter | None

    def __init__(
        self,
        weight: Recipe,
        bias: Recipe | None,
        correction: Recipe | None,
        routing: Routing,
        kernels: Kernels,
        *,
        in_float32: bool = False,
    ) -> None:
        super().__init__({"weight": weight, "bias": bias, "correction": correction})
        self.num_experts = weight.shape[0]
        self.routing = routing
        self.in_float32 = in_float32
        """Compute the logits in float32 for any dtype of the model."""
        self.counts: Tensor | None = None
        """Counter of the tokens of each expert, int32 [E]; None: they are not counted."""
        self._kernels = kernels

    def forward(self, x: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] -> logits [T, E], weights [T, K] float32, experts [T, K]; negative slots: no expert."""
        if self.in_float32:
            bias = None if self.bias is None else self.bias.float()
            logits: Tensor = self._kernels.linear(x.float(), self.weight.float(), bias)
        else:
            logits = self._logits(x)
        weights, chosen = self._kernels.route(logits, self.routing, self.correction, slots=slots, counts=self.counts)
        return logits, weights, chosen

    def _logits(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, E], in the dtype of both."""
        product, gemv = self._kernels.linear, self._kernels.gemv
        if gemv is not None and takes_few_rows(len(x), x.dtype):
            product = gemv
        logits: Tensor = product(x, self.weight, bias=self.bias)
        return logits

    def extra_repr(self) -> str:
        """Overrides that of the replaced class, also a base, which may print attributes that this one lacks."""
        return f"{self.num_experts} experts, {self.routing}"


class Experts(Made):
    """All experts of a layer: gate_up [E, 2 I, H] (all gates, then all ups) or up [E, I, H], and down [E, H, I].

    Quantized experts have stacks of another kind.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    rows_kind: str | None = None
    """Kind to which rows may be quantized in steps of many tokens; None: they are not."""

    def __init__(
        self,
        gate_up: Recipe,
        down: Recipe,
        gate_up_bias: Recipe | None,
        down_bias: Recipe | None,
        kernels: Kernels,
        **activation: Any,
    ) -> None:
        super().__init__({"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias})
        self.num_experts = gate_up.shape[0]
        self.activation = activation
        """act, gated, limit, alpha: see `kernels.experts`."""
        self._kernels = kernels

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, add: Tensor | None = None) -> Tensor:
        """The weighted sum of the chosen experts for each token [T, H], plus `add`, which may be overwritten."""
        more: dict[str, Any] = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias, "add": add, "out": add}
        if self.rows_kind is not None:
            more["rows"] = self.rows_kind
        stacks = self.stack("gate_up"), self.stack("down")
        result: Tensor = self._kernels.experts(x, *stacks, weights, chosen, **self.activation, **more)
        return result

    def stack(self, name: str) -> Tensor | Packed:
        """The weights of all experts as kernels take them. name: gate_up or down."""
        weight = self._parameters[name]
        assert weight is not None, "both stacks have weights"
        return weight


class Dense(nn.Module):
    """The shared MLP, for every token."""

    def __init__(self, up: Linear, down: Linear, act: str, *, gated: bool = True) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.act = act
        self.gated = gated

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], plus `add`, which may be overwritten."""
        result: Tensor = self.down(self.up(x, act=self.act, gated=self.gated), add=add, reuse=add is not None)
        return result


class MixtureOfExperts(nn.Module):
    """Router, experts and shared MLP.

    shared_gate: weight of the shared MLP (Qwen2-MoE). coefficient: weights of experts and shared MLP (residual experts
    of DeepSpeed).
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        kernels: Kernels,
        dense: Dense | None = None,
        shared_gate: Linear | None = None,
        coefficient: Linear | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.dense = dense
        self.shared_gate = shared_gate
        self.coefficient = coefficient
        self.where: Callable[[Tensor], Tensor] | None = None
        """Maps the router's choices to this rank's experts; None: all experts are on this rank."""
        self.group: Group = ALONE
        """Ranks with the same tokens and other (parts of) experts: their results are summed."""
        self.together = True
        """Whether experts and shared MLP are summed over these ranks at once."""
        self.dense_group: Group = ALONE
        """If not together: the ranks that share the shared MLP."""
        self._kernels = kernels

    def forward(self, x: Tensor, slots: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], plus `add`, which may be overwritten.

        Rows with a negative slot are padding, and may get anything.
        """
        return self.in_full(x, slots, add)[0]

    def in_full(
        self, x: Tensor, slots: Tensor | None = None, add: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with the logits of the router [T, E] and the chosen experts [T, K]."""
        logits, weights, chosen = self.router(x, slots)
        own = chosen if self.where is None else self.where(chosen)
        if self.dense is None and self.group.size == 1:
            return self.experts(x, weights, own, add), logits, chosen
        result = self.experts(x, weights, own)
        if self.dense is None:
            result = self.group.sum(result)
        elif self.together:
            result = self.group.sum(self._with_dense(self.dense, x, result))
        else:
            result = self._with_dense(self.dense, x, self.group.sum(result))
        # like the model: first the sum of experts and shared MLP, then `add`
        return result if add is None else add.add_(result), logits, chosen

    def _with_dense(self, dense: Dense, x: Tensor, routed: Tensor) -> Tensor:
        if self.coefficient is not None:
            own, other = self.coefficient(x).chunk(2, dim=1)
            share: Tensor = self._kernels.bias_act(own - other, None, "sigmoid")  # the softmax of both
            return routed * share + self.dense_group.sum(dense(x)) * (1 - share)
        if self.shared_gate is not None:
            return routed + self.shared_gate(x, act="sigmoid") * self.dense_group.sum(dense(x))
        if self.dense_group.size > 1:
            return routed + self.dense_group.sum(dense(x))
        result: Tensor = dense(x, routed)
        return result


def router_class(kind: type[nn.Module]) -> type[Router]:
    """Our router as a subclass of Hugging Face's, which finds the routers to record by class."""
    if not kind.__module__.startswith("transformers."):
        return Router
    return type(f"Fused{kind.__name__}", (Router, kind), {})


class OwnMixture(nn.Module):
    """A fused mixture with the forward of the module that it replaces, whose class is not Hugging Face's."""

    def __init__(self, mixture: MixtureOfExperts, returns: str, logits_dim: int) -> None:
        nn.Module.__init__(self)  # not the __init__ of the replaced class, which is a base too
        self.mixture = mixture
        self.returns = returns
        """hidden: hidden states · logits: also the router's logits · deepspeed: also a loss of 0, tokens per expert."""
        self.logits_dim = logits_dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., H] -> [..., H], with the further results of the replaced module."""
        hidden_states, *others = (*args, *kwargs.values())
        if any(other is not None for other in others):  # used_token of DeepSpeed
            raise NotSupported("experts: a fused mixture takes only hidden states, and routes all their tokens")
        hidden, logits, chosen = self.mixture.in_full(hidden_states.reshape(-1, hidden_states.shape[-1]))
        hidden = hidden.view(hidden_states.shape)
        if self.returns == "logits":
            return hidden, logits.view(*hidden_states.shape[:-1], -1) if self.logits_dim == 3 else logits
        if self.returns == "deepspeed":
            counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
            counts.index_add_(0, chosen.flatten().long(), torch.ones_like(chosen.flatten(), dtype=torch.int64))
            return hidden, logits.new_zeros(()), counts
        return hidden
