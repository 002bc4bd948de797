"""The fused modules: a linear with what stands before and after it, a norm, an embedding, and the one layer of all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from outpace.inject.policy import Policy, Settings
from outpace.inject.recipe import Recipe
from outpace.kernels.activation import activation_kind
from outpace.kernels.dispatch import Kernels
from outpace.kernels.gemv import prefers_gemv
from outpace.kernels.quantize import empty_rows
from outpace.parallel.vocabulary import ALL, Vocabulary


class Attend(Protocol):
    """Attention over wherever the keys and values are."""

    @property
    def slots(self) -> Tensor | None:
        """Where each token's keys and values go [T]; negative: the row is padding. None: no row is known to be."""

    def __call__(self, layer: "FusedLayer", qkv: Tensor) -> Tensor:
        """(layer, qkv [T, (Hq + 2 Hkv) * D]) -> [T, Hq * D]."""


class Before(Protocol):
    """What is done to rows before a linear: a norm, or an activation."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [T, H] -> [T, K]."""

    def quantized(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """The same as values of this kind and scales, in one kernel where there is one."""


class Norm(nn.Module):
    """RMS or layer norm of rows, with the weights of the model's own norm."""

    def __init__(
        self,
        kind: Literal["rms", "layer"],
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        eps: float,
        kernels: Kernels,
        *,
        offset: float = 0.0,
        round_before_weight: bool = True,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.weight = weight
        self.bias = bias
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

    def quantized(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Norm of x [T, H] as values of this kind and scales [T, 1]."""
        if self.kind == "layer":
            rows: tuple[Tensor, Tensor] = self._kernels.quantize_rows(self(x), kind)
            return rows
        values, scales = empty_rows(x.shape[0], x.shape[1], kind, x.device)
        options = {"weight_offset": self.offset, "round_before_weight": self.round_before_weight}
        self._kernels.rms_norm(x, self.weight, self.eps, out=values, scales=scales, **options)
        return values, scales


def fused_norm(norm: Norm) -> dict[str, Any]:
    """The options of a product that does a norm itself; none where it cannot."""
    if norm.kind != "rms" or norm.weight is None:
        return {}
    options = {"norm_weight": norm.weight, "eps": norm.eps, "weight_offset": norm.offset}
    return {**options, "round_before_weight": norm.round_before_weight}


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation before a linear that takes quantized rows: its kernel writes them."""

    name: str
    gated: bool
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[T, 2K] where gated, else [T, K] -> [T, K]."""
        y: Tensor = self.kernels.gated_act(x, self.name) if self.gated else self.kernels.bias_act(x, None, self.name)
        return y

    def quantized(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """The same as values of this kind and scales [T, 1]."""
        values, scales = empty_rows(len(x), x.shape[1] // (2 if self.gated else 1), kind, x.device)
        if self.gated:
            self.kernels.gated_act(x, self.name, out=values, scales=scales)
        else:
            self.kernels.bias_act(x, None, self.name, out=values, scales=scales)
        return values, scales


class Made(nn.Module):
    """A module whose weights are made by recipes. They are on the meta device until loading fills them."""

    def __init__(self, recipes: Mapping[str, Recipe | None]) -> None:
        nn.Module.__init__(self)  # and not that of a class which it passes for
        self.recipes = {name: recipe for name, recipe in recipes.items() if recipe is not None}
        """By the names of the parameters. A weight with a scheme has more of them: scales, zeros."""
        for name, recipe in recipes.items():
            if recipe is None:
                self.register_parameter(name, None)
                continue
            for end, (shape, dtype) in _tensors(recipe).items():
                empty = torch.empty(shape, dtype=dtype, device="meta")
                self.register_parameter(name + end, nn.Parameter(empty, requires_grad=False))

    def beside(self) -> frozenset[str]:
        """Names of the parameters that come with another one."""
        return frozenset(name + end for name, recipe in self.recipes.items() for end in _tensors(recipe) if end)


def _tensors(recipe: Recipe) -> Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """What the weight of a recipe is kept in, by what is put behind its name."""
    if recipe.scheme is None:
        return {"": (recipe.shape, None)}
    return recipe.scheme.tensors(recipe.shape)


class Embedding(Made):
    """Rows of a table by token ids."""

    weight: nn.Parameter

    def __init__(self, weight: Recipe, kernels: Kernels, scale: float = 1.0) -> None:
        super().__init__({"weight": weight})
        self.scale = scale
        """What the model around it expects of it, and does not multiply with itself."""
        self._kernels = kernels

    @property
    def dtype(self) -> torch.dtype:
        """Of its rows."""
        return self.weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., H], as the model around it calls it."""
        rows = self.rows(ids.reshape(-1), scale=self.scale)
        return rows.view(*ids.shape, rows.shape[-1])

    def rows(self, ids: Tensor, **options: Any) -> Tensor:
        """[T] -> [T, H], with scale and learned positions (`kernels.embedding`)."""
        rows: Tensor = self._kernels.embed(ids, self.weight, **options)
        return rows


class Linear(Made):
    """x @ weight.T + bias, with the norm before it, the activation after it, and what its result is added to.

    Parallel, quantized and streamed linears take its place: they bring a product of their own.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    rows_kind: str | None = None
    """What rows are quantized to before its product; None: they are not."""
    vocabulary: Vocabulary = ALL
    """Of a head: whose logits it gives to those who call it with rows. The model around it gets all."""

    def __init__(self, weight: Recipe, bias: Recipe | None, kernels: Kernels) -> None:
        super().__init__({"weight": weight, "bias": bias})
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels

    def forward(
        self,
        x: Tensor,
        *,
        norm: Before | None = None,
        act: str | None = None,
        gated: bool = False,
        add: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """[T, K] -> [T, N], or [T, N / 2] where gated. `reuse`: nobody needs `add` any more, so it may hold the sum."""
        if x.dim() != 2:  # a head, called by the model around it
            rows = self.vocabulary.whole(self.forward(x.reshape(-1, x.shape[-1])))
            return rows.view(*x.shape[:-1], rows.shape[-1])
        if (result := self.at_once(x, norm, act, gated, add)) is not None:
            return result
        if norm is not None:
            x = norm(x)
        if gated and act is not None:
            return self._kernels.gated_act(self.product(x, self.bias), act)
        if act is not None:
            return self._kernels.bias_act(self.product(x), self.bias, act)
        return self.product(x, self.bias, add=add, out=add if reuse else None)

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T + bias + add."""
        raise NotImplementedError

    def at_once(
        self, x: Tensor, before: Before | None, act: str | None, gated: bool, add: Tensor | None
    ) -> Tensor | None:
        """All that `forward` does, for a linear that has one kernel for it at so many rows; None: it has not."""
        return None

    def rounds(self, rows: int) -> bool:
        """Whether so many rows are quantized before its product."""
        return self.rows_kind is not None


class PlainLinear(Linear):
    """A linear whose weight [N, K] is in the dtype of what it is multiplied with."""

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """By the library, or by an invariant kernel."""
        product: Tensor = self._kernels.linear(x, self.weight, bias, add=add, out=out)
        return product

    def at_once(
        self, x: Tensor, before: Before | None, act: str | None, gated: bool, add: Tensor | None
    ) -> Tensor | None:
        """Few rows in one kernel, which reads the weights once."""
        if self._kernels.gemv is None or (act is not None and not gated):
            return None
        if not prefers_gemv(len(x), self.out_features, self.in_features, gated=gated):
            return None
        fused = fused_norm(before) if isinstance(before, Norm) else {}
        if before is not None and not fused:
            x = before(x)
        kind = None if act is None else activation_kind(act)
        result: Tensor = self._kernels.gemv(x, self.weight, bias=self.bias, activation=kind, add=add, **fused)
        return result


class FusedLayer(nn.Module):
    """A transformer layer of any family: four linears, its norms, and an attention that the caller brings."""

    qkv: Linear
    out: Linear
    up: Linear | None
    down: Linear | None
    mlp: nn.Module | None
    mixture: nn.Module | None
    attn_norm: Norm
    mlp_norm: Norm | None
    attn_out_norm: Norm | None
    mlp_out_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    sink_values: "Made | None"
    shared_sum: "Callable[[FusedLayer, Tensor, Attend], Tensor] | None" = None
    """How ranks add up attention and MLP at once, where both come from one x; None: there is nothing to add up."""
    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, policy: Policy, settings: Settings, index: int, kernels: Kernels) -> None:
        nn.Module.__init__(self)  # and not the replaced layer's, which stands behind this class
        self.policy = policy
        self.settings = settings
        """Its numbers; of a rank's part of a layer, that part's."""
        self.whole = settings
        """Those of the whole layer."""
        self.first_head = 0
        """Which query head of the whole layer its first one is."""
        self.index = index
        self.kernels = kernels

    @property
    def sinks(self) -> nn.Parameter | None:
        """A logit for each head that takes probability and has no value."""
        return None if self.sink_values is None else self.sink_values._parameters["weight"]

    def run(self, x: Tensor, attend: Attend | Sequence[tuple[slice, Attend]], *, reuse: bool = False) -> Tensor:
        """The layer over rows. x: [T, H]; `reuse`: it may be overwritten.

        attend: for all rows, or for some of them after the other: micro-batches, for which x is overwritten.
        """
        place = _PLACEMENTS[self.policy.placement]
        if not isinstance(attend, Sequence):
            return place(self, x, attend, reuse)
        for rows, each in attend:
            part = x[rows]
            if (made := place(self, part, each, True)).data_ptr() != part.data_ptr():
                part.copy_(made)
        return x

    def attention(
        self, x: Tensor, norm: Norm | None, attend: Attend, add: Tensor | None, reuse: bool = False
    ) -> Tensor:
        """Attention of norm(x), plus `add`."""
        return self.out(self.attended(x, norm, attend), add=add, reuse=reuse)

    def attended(self, x: Tensor, norm: Norm | None, attend: Attend) -> Tensor:
        """What the output projection of the attention reads."""
        qkv = self.qkv(x, norm=norm)
        if self.policy.qk_norm_over == "all":
            qkv = self._all_heads_normed(qkv)
        if self.settings.clip:
            qkv = qkv.clamp_(-self.settings.clip, self.settings.clip)
        return attend(self, qkv)

    def _all_heads_normed(self, qkv: Tensor) -> Tensor:
        """q and k under norms over all heads together."""
        assert self.q_norm is not None, "such a layer has both"
        assert self.k_norm is not None, "such a layer has both"
        kv = self.settings.num_kv_heads * self.settings.head_dim
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv, kv, kv], dim=1)
        return torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], dim=1)

    def feed_forward(self, x: Tensor, norm: Norm | None, add: Tensor | None, slots: Tensor | None) -> Tensor:
        """MLP of norm(x), plus `add`, which is a sum of this layer's own and may be overwritten."""
        if self.mixture is not None:
            routed: Tensor = self.mixture(x if norm is None else norm(x), slots, add)
            return routed
        if self.mlp is not None:
            result: Any = self.mlp((norm(x) if norm is not None else x)[None])
            result = result[0] if isinstance(result, tuple) else result
            return result[0] if add is None else add + result[0]
        assert self.down is not None, "a layer has an MLP or its projections"
        rows, before = self.activated(x, norm)
        return self.down(rows, norm=before, add=add, reuse=True)

    def activated(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Before | None]:
        """What the second projection of the MLP reads, and what is to be done to it first."""
        assert self.up is not None, "a layer has an MLP or its projections"
        assert self.down is not None, "a layer has an MLP or its projections"
        act, gated = self.settings.activation, self.policy.gated
        if self.down.rounds(len(x)):
            return self.up(x, norm=norm), Activation(act, gated, self.kernels)
        return self.up(x, norm=norm, act=act, gated=gated), None


def _pre(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    x = layer.attention(x, layer.attn_norm, attend, add=x, reuse=reuse)
    return layer.feed_forward(x, layer.mlp_norm, add=x, slots=attend.slots)


def _post(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    x = layer.attn_norm(layer.attention(x, None, attend, add=x, reuse=reuse))
    assert layer.mlp_norm is not None, "post placement has two norms"
    return layer.mlp_norm(layer.feed_forward(x, None, add=x, slots=attend.slots))


def _sandwich(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    assert layer.attn_out_norm is not None, "sandwich placement has four norms"
    assert layer.mlp_out_norm is not None, "sandwich placement has four norms"
    x = x + layer.attn_out_norm(layer.attention(x, layer.attn_norm, attend, add=None))
    return x + layer.mlp_out_norm(layer.feed_forward(x, layer.mlp_norm, add=None, slots=attend.slots))


def _parallel(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    if layer.shared_sum is not None:
        return layer.shared_sum(layer, x, attend)
    if layer.mlp_norm is not None:
        attended = layer.attention(x, layer.attn_norm, attend, add=x)
        return layer.feed_forward(x, layer.mlp_norm, add=attended, slots=attend.slots)
    normed = layer.attn_norm(x)
    return layer.feed_forward(normed, None, add=layer.attention(normed, None, attend, add=x), slots=attend.slots)


def _normed(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    assert layer.mlp_norm is not None, "normed placement has two norms"
    x = layer.attn_norm(x)
    x = layer.mlp_norm(layer.attention(x, None, attend, add=x))
    return layer.feed_forward(x, None, add=x, slots=attend.slots)


def _scaled(layer: FusedLayer, x: Tensor, attend: Attend, reuse: bool) -> Tensor:
    scale = layer.settings.residual
    x = x + layer.attention(x, layer.attn_norm, attend, add=None) * scale
    return x + layer.feed_forward(x, layer.mlp_norm, add=None, slots=attend.slots) * scale


_PLACEMENTS: dict[str, Callable[[FusedLayer, Tensor, Attend, bool], Tensor]] = {
    "pre": _pre,
    "post": _post,
    "sandwich": _sandwich,
    "parallel": _parallel,
    "normed": _normed,
    "scaled": _scaled,
}
