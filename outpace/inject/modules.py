"""The fused modules: norm, embedding, linear with prologue and epilogue, and the one layer for all families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from outpace.inject.policy import LayerSettings, Policy
from outpace.inject.recipe import Recipe
from outpace.kernels.activation import activation_kind
from outpace.kernels.dispatch import Kernels
from outpace.kernels.few_rows import folds_norm, takes_few_rows
from outpace.kernels.quantize import empty_rows
from outpace.parallel.vocabulary import ALL, Vocabulary


class Attend(Protocol):
    """Attention of a batch; knows where keys and values are stored."""

    @property
    def slots(self) -> Tensor | None:
        """Slot for the keys and values of each token [T]; negative: padding. None: no row is known to be padding."""

    def __call__(self, layer: "FusedLayer", qkv: Tensor) -> Tensor:
        """(layer, qkv [T, (Hq + 2 Hkv) * D]) -> [T, Hq * D]."""


class Prologue(Protocol):
    """A norm or an activation that a linear applies to its input first."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [T, H] -> [T, K]."""

    def quantized(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """The same, quantized: values of this kind and scales, by one kernel if there is one."""


class Norm(nn.Module):
    """RMS norm or layer norm of rows, with the weights of the model's own norm."""

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

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Norm of x: [T, H] or [T, heads, D], plus `add`."""
        if self.kind == "layer":
            normed: Tensor = self._kernels.layer_norm(x, self.weight, self.bias, self.eps)
            return normed if add is None else add + normed
        options = {"weight_offset": self.offset, "round_before_weight": self.round_before_weight}
        summed: Tensor = self._kernels.rms_norm(x, self.weight, self.eps, add=add, **options)
        return summed

    def quantized(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Norm of x [T, H] as values of this kind and scales [T, 1]."""
        if self.kind == "layer":
            rows: tuple[Tensor, Tensor] = self._kernels.quantize_rows(self(x), kind)
            return rows
        values, scales = empty_rows(x.shape[0], x.shape[1], kind, x.device)
        options = {"weight_offset": self.offset, "round_before_weight": self.round_before_weight}
        self._kernels.rms_norm(x, self.weight, self.eps, out=values, scales=scales, **options)
        return values, scales


def fused_norm(norm: Norm, *, centers: bool = False) -> dict[str, Any]:
    """Keywords for a kernel that computes the norm before its product; empty: it cannot. centers: also layer norms."""
    if norm.weight is None or (norm.kind == "layer" and not centers):
        return {}
    if norm.kind == "layer":
        return {"norm_weight": norm.weight, "norm_bias": norm.bias, "centered": True, "eps": norm.eps}
    options = {"norm_weight": norm.weight, "eps": norm.eps, "weight_offset": norm.offset}
    return {**options, "round_before_weight": norm.round_before_weight}


@dataclass(frozen=True, slots=True)
class RoundedActivation:
    """An activation before a linear with quantized input: its kernel writes the quantized rows."""

    name: str
    gated: bool
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[T, 2K] if gated, else [T, K] -> [T, K]."""
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
    """A module with weights made by recipes. They stay on the meta device until loading fills them."""

    def __init__(self, recipes: Mapping[str, Recipe | None]) -> None:
        nn.Module.__init__(self)  # not the __init__ of the replaced class, which is a base too
        self.recipes = {name: recipe for name, recipe in recipes.items() if recipe is not None}
        """By parameter. A quantized weight has further parameters: scales, zeros."""
        for name, recipe in recipes.items():
            if recipe is None:
                self.register_parameter(name, None)
                continue
            for end, (shape, dtype) in _tensors(recipe).items():
                empty = torch.empty(shape, dtype=dtype, device="meta")
                self.register_parameter(name + end, nn.Parameter(empty, requires_grad=False))

    def beside(self) -> frozenset[str]:
        """Names of the further parameters: scales and zeros."""
        return frozenset(name + end for name, recipe in self.recipes.items() for end in _tensors(recipe) if end)


def _tensors(recipe: Recipe) -> Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of each tensor of a weight, by the ending of its name."""
    if recipe.scheme is None:
        return {"": (recipe.shape, None)}
    return recipe.scheme.tensors(recipe.shape)


class Embedding(Made):
    """Rows of a table by token ids."""

    weight: nn.Parameter

    def __init__(self, weight: Recipe, kernels: Kernels, scale: float = 1.0) -> None:
        super().__init__({"weight": weight})
        self.scale = scale
        """Factor on the rows that the model expects of this module."""
        self._kernels = kernels

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., H]; the model calls this."""
        rows = self.rows(ids.reshape(-1), scale=self.scale)
        return rows.view(*ids.shape, rows.shape[-1])

    def rows(self, ids: Tensor, **options: Any) -> Tensor:
        """[T] -> [T, H], with scale and learned positions (`kernels.embedding`)."""
        rows: Tensor = self._kernels.embed(ids, self.weight, **options)
        return rows


class Linear(Made):
    """x @ weight.T + bias, with an optional norm before, activation after, and a sum with `add`.

    Subclasses (quantized, over ranks) have a `product` of their own.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    rows_kind: str | None = None
    """Kind that input rows are quantized to; None: they are not."""
    vocabulary: Vocabulary = ALL
    """Of a head: the tokens whose logits a call with rows [T, K] returns. A call by the model returns all logits."""

    def __init__(self, weight: Recipe, bias: Recipe | None, kernels: Kernels) -> None:
        super().__init__({"weight": weight, "bias": bias})
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels

    def forward(
        self,
        x: Tensor,
        *,
        norm: Prologue | None = None,
        act: str | None = None,
        gated: bool = False,
        add: Tensor | None = None,
        reuse: bool = False,
    ) -> Tensor:
        """[T, K] -> [T, N], or [T, N / 2] if gated. `reuse`: the sum may be written into `add`."""
        if x.dim() != 2:  # a head, called by the model
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
        raise NotImplementedError

    def at_once(
        self, x: Tensor, before: Prologue | None, act: str | None, gated: bool, add: Tensor | None
    ) -> Tensor | None:
        """All of `forward` in one kernel; None: there is no such kernel for this number of rows."""
        return None

    def rounds(self, rows: int) -> bool:
        """Whether an input with this many rows is quantized."""
        return self.rows_kind is not None


class PlainLinear(Linear):
    """A linear whose weight [N, K] has the dtype of its input."""

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """By cuBLAS, or by a batch-invariant kernel."""
        product: Tensor = self._kernels.linear(x, self.weight, bias, add=add, out=out)
        return product

    def at_once(
        self, x: Tensor, before: Prologue | None, act: str | None, gated: bool, add: Tensor | None
    ) -> Tensor | None:
        """For few rows, where reading the weights takes the time."""
        gemv = self._kernels.gemv
        if gemv is None or not takes_few_rows(len(x), x.dtype) or 0 in self.weight.shape:
            return None
        fused = {}
        if isinstance(before, Norm) and folds_norm(len(x), x.dtype, centered=before.kind == "layer"):
            fused = fused_norm(before, centers=True)
        if before is not None and not fused:
            x = before(x)
        options = {"activation": None if act is None else activation_kind(act), "gated": gated, "add": add}
        result: Tensor = gemv(x, self.weight, bias=self.bias, **options, **fused)
        return result


class FusedLayer(nn.Module):
    """A transformer layer of any family: four linears and norms. The caller passes the attention."""

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
    """Over ranks with parallel placement: one sum for attention and MLP together; None: separate sums, or one rank."""
    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, policy: Policy, settings: LayerSettings, index: int, kernels: Kernels) -> None:
        nn.Module.__init__(self)  # not the __init__ of the replaced layer, which is a base too
        self.policy = policy
        self.settings = settings
        """The numbers of this rank's part of the layer."""
        self.whole = settings
        """The numbers of the whole layer."""
        self.first_head = 0
        """Number of its first query head in the whole layer."""
        self.index = index
        self.kernels = kernels

    @property
    def sinks(self) -> nn.Parameter | None:
        """Attention sinks: one more logit for each head, without a value."""
        return None if self.sink_values is None else self.sink_values._parameters["weight"]

    def run(self, x: Tensor, attend: Attend | Sequence[tuple[slice, Attend]], *, reuse: bool = False) -> Tensor:
        """The layer over rows. x: [T, H]; `reuse`: x may be overwritten.

        attend: for all rows at once, or a list of (rows, attend) for micro-batches, which overwrite x.
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
        """The input of the attention's output projection."""
        qkv = self.qkv(x, norm=norm)
        if self.policy.qk_norm_over == "all":
            qkv = self._all_heads_normed(qkv)
        if self.settings.clip:
            qkv = qkv.clamp_(-self.settings.clip, self.settings.clip)
        return attend(self, qkv)

    def _all_heads_normed(self, qkv: Tensor) -> Tensor:
        """q and k under norms over all heads together."""
        assert self.q_norm is not None, "a policy with qk_norm_over names both"
        assert self.k_norm is not None, "a policy with qk_norm_over names both"
        kv = self.settings.num_kv_heads * self.settings.head_dim
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv, kv, kv], dim=1)
        return torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], dim=1)

    def feed_forward(self, x: Tensor, norm: Norm | None, add: Tensor | None, slots: Tensor | None) -> Tensor:
        """MLP of norm(x), plus `add`, which may be overwritten."""
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

    def activated(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Prologue | None]:
        """The input of the MLP's second projection, and the prologue still to be applied to it."""
        assert self.up is not None, "a layer has an MLP or its projections"
        assert self.down is not None, "a layer has an MLP or its projections"
        act, gated = self.settings.activation, self.policy.gated
        if self.down.rounds(len(x)):
            return self.up(x, norm=norm), RoundedActivation(act, gated, self.kernels)
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
    x = layer.attn_out_norm(layer.attention(x, layer.attn_norm, attend, add=None), add=x)
    return layer.mlp_out_norm(layer.feed_forward(x, layer.mlp_norm, add=None, slots=attend.slots), add=x)


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
