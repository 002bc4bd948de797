"""The arguments of a mixture of experts, checked once for every implementation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.kernels.activation import activation_kind
from outpace.kernels.packed import Packed

Stack = Tensor | Packed
"""The weights of all experts, [E, N, K], plain or quantized."""


class ExpertsCall(NamedTuple):
    """Each token through its experts: gate and up, activation, down, and the weighted sum of the results.

    Products and activation are rounded to the dtype of x; the sum over the experts is taken in float32 and rounded
    once; `add` is added to that, and the sum is rounded again.
    """

    x: Tensor
    """[T, H]"""
    gate_up: Stack
    """[E, 2I, H]: all gates, then all ups; without gates [E, I, H]."""
    down: Stack
    """[E, H, I]"""
    weights: Tensor
    """[T, K] float32"""
    chosen: Tensor
    """[T, K] int32; ids outside 0..E-1 add nothing."""
    act: str
    gate_up_bias: Tensor | None = None
    """[E, 2I]; without gates [E, I]."""
    down_bias: Tensor | None = None
    """[E, H]"""
    limit: float | None = None
    alpha: float | None = None
    """GPT-OSS's activation: (clamp(up) + 1) * gate * sigmoid(alpha * gate), with gate and up clamped to the limit."""
    gated: bool = True
    add: Tensor | None = None
    """[T, H]: added to the result."""
    out: Tensor | None = None
    """[T, H]: gets the result. May be `add`, or x: neither is read after it is written."""
    rows: str | None = None
    """int8 or fp8, the kind of both quantized weights: rows of both products may be rounded to it, each with its own
    scale. Only the kernels of many tokens do so, where products take longer than reading weights; a batch-invariant
    form never does."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of tokens, of experts for each token, and of all experts."""
        tokens, top_k = self.chosen.shape
        return tokens, top_k, stack_shape(self.gate_up)[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return min(self.x.numel(), self.chosen.numel(), *stack_shape(self.down)) == 0

    @property
    def after_up(self) -> dict[str, Any]:
        """The constants of kernels for the activation after the first product."""
        kind = activation_kind(self.act)
        return {"activation": kind, "gated": self.gated, "limit": self.limit, "alpha": self.alpha}

    def finish(self, y: Tensor) -> Tensor:
        """y + add, in `out`."""
        if self.add is not None:
            y = self.add.add_(y) if self.out is self.add else self.add + y
        return y if self.out is None or self.out is y else self.out.copy_(y)

    def empty_out(self) -> Tensor:
        """`out`, or new memory."""
        return torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device) if self.out is None else self.out

    def check(self) -> None:
        """Assert the shapes and dtypes that every implementation relies on."""
        x, chosen = self.x, self.chosen
        (tokens, hidden), (experts, *_), (*_, inner) = x.shape, stack_shape(self.gate_up), stack_shape(self.down)
        rows = inner * (2 if self.gated else 1)
        assert (self.limit is None) == (self.alpha is None), "limit and alpha come together"
        assert self.gated or self.limit is None, "only a gate can be clamped"
        assert stack_shape(self.gate_up) == (experts, rows, hidden), (self.gate_up.shape, (experts, rows, hidden))
        assert stack_shape(self.down) == (experts, hidden, inner), (self.down.shape, (experts, hidden, inner))
        assert chosen.shape == self.weights.shape, (chosen.shape, self.weights.shape)
        assert chosen.shape[0] == tokens, (chosen.shape, tokens)
        dtypes = self.weights.dtype, chosen.dtype
        assert dtypes == (torch.float32, torch.int32), dtypes
        assert self.gate_up_bias is None or self.gate_up_bias.shape == (experts, rows)
        assert self.down_bias is None or self.down_bias.shape == (experts, hidden)
        assert all(t is None or t.shape == x.shape for t in (self.add, self.out)), "add and out have the shape of x"
        plain = [stack for stack in (self.gate_up, self.down) if isinstance(stack, Tensor)]
        likes = (*plain, self.gate_up_bias, self.down_bias, self.add, self.out)
        assert all(t is None or t.dtype == x.dtype for t in likes), "one dtype for all"

    def check_layout(self) -> None:
        """Assert the strides too that the kernels rely on."""
        self.check()
        rows = (self.x, *_tensors(self.gate_up), *_tensors(self.down), self.add, self.out)
        assert all(t is None or t.shape[-1] == 1 or t.stride(-1) == 1 for t in rows), "rows must be contiguous"
        whole = (self.weights, self.chosen, self.gate_up_bias, self.down_bias)
        assert all(t is None or t.is_contiguous() for t in whole), "must be contiguous"


def stack_shape(stack: Stack) -> tuple[int, int, int]:
    """(E, N, K) of a stack of weights."""
    if isinstance(stack, Packed):
        assert stack.experts is not None, "a single weight is no stack of experts"
        return stack.experts, *stack.shape
    experts, rows, columns = stack.shape
    return experts, rows, columns


def _tensors(stack: Stack) -> tuple[Tensor | None, ...]:
    """The tensors of a stack."""
    return (stack.values, stack.scale, stack.zero) if isinstance(stack, Packed) else (stack,)
