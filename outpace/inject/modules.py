"""The fused modules: a linear with what stands before and after it, a norm, and the one layer that all policies use."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from outpace.inject.policy import Policy, Settings
from outpace.kernels.activation import activation_kind
from outpace.kernels.dispatch import Kernels
from outpace.kernels.gemv import prefers_gemv

Attend = Callable[["FusedLayer", Tensor], Tensor]
"""Attention over wherever the keys and values are: (layer, qkv [T, (Hq + 2 Hkv) * D]) -> [T, Hq * D]."""


class Norm(nn.Module):
    """RMS or layer norm of rows."""

    def __init__(
        self,
        kind: Literal["rms", "layer"],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        kernels: Kernels,
        *,
        offset: float = 0.0,
        round_before_weight: bool = True,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.weight = _parameter(weight)
        self.bias = _parameter(bias)
        self.eps = eps
        self.offset = offset
        self.round_before_weight = round_before_weight
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x: [T, H] or [T, heads, D]."""
        if self.kind == "layer":
            return self._kernels.layer_norm(x, self.weight, self.bias, self.eps)[0]
        options = {"weight_offset": self.offset, "round_before_weight": self.round_before_weight}
        return self._kernels.rms_norm(x, self.weight, self.eps, **options)[0]


class Linear(nn.Module):
    """x @ weight.T + bias, with the norm before it, the activation after it, and what its result is added to.

    Parallel, quantized and streamed linears take its place with the same call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # [N, K]
        self.bias = _parameter(bias)
        self._kernels = kernels

    def forward(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        act: str | None = None,
        gated: bool = False,
        add: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """[T, K] -> [T, N], or [T, N / 2] where gated. `reuse`: nobody needs `add` any more, so it may hold the sum."""
        outputs, depth = self.weight.shape
        one_kernel = self._kernels.gemv is not None and (act is None or gated)
        if one_kernel and prefers_gemv(len(x), outputs, depth, gated=gated):
            return self._few_rows(x, norm, act, add)
        if norm is not None:
            x = norm(x)
        if act is not None:
            return self._activated(x, act, gated)
        return self._kernels.linear(x, self.weight, self.bias, add=add, out=add if reuse else None)

    def _few_rows(self, x: Tensor, norm: Norm | None, act: str | None, add: Tensor | None) -> Tensor:
        """All of it in one kernel, which reads the weights once."""
        assert self._kernels.gemv is not None, "asked before"
        fused: dict[str, Any] = {}
        if norm is not None and norm.kind == "rms" and norm.weight is not None:
            fused = {"norm_weight": norm.weight, "eps": norm.eps, "weight_offset": norm.offset}
            fused["round_before_weight"] = norm.round_before_weight
        elif norm is not None:
            x = norm(x)
        kind = None if act is None else activation_kind(act)
        return self._kernels.gemv(x, self.weight, bias=self.bias, activation=kind, add=add, **fused)

    def _activated(self, x: Tensor, act: str, gated: bool) -> Tensor:
        if gated:
            return self._kernels.gated_act(self._kernels.linear(x, self.weight, self.bias), act)
        return self._kernels.bias_act(self._kernels.linear(x, self.weight), self.bias, act)


class FusedLayer(nn.Module):
    """A transformer layer of any family: four linears, its norms, and an attention that the caller brings."""

    qkv: Linear
    out: Linear
    up: Linear | None
    down: Linear | None
    mlp: nn.Module | None
    attn_norm: Norm
    mlp_norm: Norm | None
    attn_out_norm: Norm | None
    mlp_out_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Tensor | None
    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, policy: Policy, settings: Settings, index: int, kernels: Kernels) -> None:
        nn.Module.__init__(self)  # and not the replaced layer's, which stands behind this class
        self.policy = policy
        self.settings = settings
        self.index = index
        self.kernels = kernels

    def run(self, x: Tensor, attend: Attend, *, reuse: bool = False) -> Tensor:
        """The layer over rows. x: [T, H]; `reuse`: it may be overwritten."""
        return _PLACEMENTS[self.policy.placement](self, x, attend, reuse)

    def attention(
        self, x: Tensor, norm: Norm | None, attend: Attend, add: Tensor | None, reuse: bool = False
    ) -> Tensor:
        """Attention of norm(x), plus `add`."""
        qkv = self.qkv(x, norm=norm)
        if self.settings.clip:
            qkv = qkv.clamp_(-self.settings.clip, self.settings.clip)
        return self.out(attend(self, qkv), add=add, reuse=reuse)

    def feed_forward(self, x: Tensor, norm: Norm | None, add: Tensor | None) -> Tensor:
        """MLP of norm(x), plus `add`, which is a sum of this layer's own and may be overwritten."""
        if self.mlp is not None:
            result: Any = self.mlp((norm(x) if norm is not None else x)[None])
            result = result[0] if isinstance(result, tuple) else result
            return result[0] if add is None else add + result[0]
        assert self.up is not None, "a layer has an MLP or its projections"
        assert self.down is not None, "a layer has an MLP or its projections"
        inner = self.up(x, norm=norm, act=self.settings.activation, gated=self.policy.gated)
        return self.down(inner, add=add, reuse=True)


def _pre(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    x = layer.attention(x, layer.attn_norm, attend, add=x, reuse=reuse)
    return layer.feed_forward(x, layer.mlp_norm, add=x)


def _post(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    x = layer.attn_norm(layer.attention(x, None, attend, add=x, reuse=reuse))
    assert layer.mlp_norm is not None, "post placement has two norms"
    return layer.mlp_norm(layer.feed_forward(x, None, add=x))


def _sandwich(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    assert layer.attn_out_norm is not None, "sandwich placement has four norms"
    assert layer.mlp_out_norm is not None, "sandwich placement has four norms"
    x = x + layer.attn_out_norm(layer.attention(x, layer.attn_norm, attend, add=None))
    return x + layer.mlp_out_norm(layer.feed_forward(x, layer.mlp_norm, add=None))


def _parallel(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    if layer.mlp_norm is not None:
        attended = layer.attention(x, layer.attn_norm, attend, add=x)
        return layer.feed_forward(x, layer.mlp_norm, add=attended)
    normed = layer.attn_norm(x)
    return layer.feed_forward(normed, None, add=layer.attention(normed, None, attend, add=x))


def _normed(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    assert layer.mlp_norm is not None, "normed placement has two norms"
    x = layer.attn_norm(x)
    x = layer.mlp_norm(layer.attention(x, None, attend, add=x))
    return layer.feed_forward(x, None, add=x)


def _scaled(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    scale = layer.settings.residual
    x = x + layer.attention(x, layer.attn_norm, attend, add=None) * scale
    return x + layer.feed_forward(x, layer.mlp_norm, add=None) * scale


_PLACEMENTS: dict[str, Callable[[FusedLayer, Tensor, Attend, bool], Tensor]] = {
    "pre": _pre,
    "post": _post,
    "sandwich": _sandwich,
    "parallel": _parallel,
    "normed": _normed,
    "scaled": _scaled,
}


def _parameter(value: Tensor | None) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(value, requires_grad=False)
