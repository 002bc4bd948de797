"""Modules of which each rank has a part, with their communication."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.inject.modules import Attend, Embedding, FusedLayer, Linear, Made, Norm, Prologue
from outpace.inject.recipe import Recipe
from outpace.kernels.dispatch import Kernels
from outpace.parallel.group import Group
from outpace.parallel.spans import Span
from outpace.parallel.vocabulary import Vocabulary


class SummedLinear(Linear):
    """A linear cut by columns: products are summed over ranks, then bias and `add` are added."""

    def __init__(self, inner: Linear, bias: Recipe | None, group: Group, kernels: Kernels) -> None:
        Made.__init__(self, {"bias": bias})
        self.inner = inner
        self.group = group
        self.out_features, self.in_features = inner.out_features, inner.in_features
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
        assert act is None, "nothing comes between a product and its sum over ranks"
        return self.whole(self.partial(x, norm=norm), add)

    def partial(self, x: Tensor, *, norm: Prologue | None = None, add: Tensor | None = None) -> Tensor:
        """This rank's share of the product, plus a share `add` of another sum."""
        found: Tensor = self.inner(x, norm=norm, add=add, reuse=add is not None)
        return found

    def whole(self, share: Tensor, add: Tensor | None = None) -> Tensor:
        """The sum of all ranks' shares, with bias and `add`."""
        y = self.group.sum(share)
        y = y if self.bias is None else y.add_(self.bias)
        return y if add is None else y.add_(add)

    def rounds(self, rows: int) -> bool:
        return self.inner.rounds(rows)

    def extra_repr(self) -> str:
        return f"added up over {self.group.size} ranks"


class RankLinear(nn.Module):
    """This rank's part of a linear, for a model that keeps its own layers."""

    def __init__(self, inner: Linear, takes: Span | None = None, gives: Vocabulary | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.takes = takes
        """This rank's columns of an input of all ranks; None: the input is this rank's own."""
        self.gives = gives
        """How the outputs of all ranks are joined; None: they are not, or they are summed."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x if self.takes is None else x[..., self.takes[0] : self.takes[1]])
        return y if self.gives is None else self.gives.whole(y)

    @property
    def weight(self) -> nn.Parameter:
        """This rank's part: models read its dtype and device."""
        return self.inner.inner.weight if isinstance(self.inner, SummedLinear) else self.inner.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """This rank's part, or the whole bias if outputs are summed."""
        return self.inner.bias


class RankTable(nn.Embedding):
    """A base for subclasses of nn.Embedding that change its rows, such as Gemma's, which scales them."""

    weight_of_rank: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = self.weight_of_rank(input)
        return rows


class RankFeatures(nn.Module):
    """An embedding cut by columns; outputs are joined."""

    def __init__(self, inner: Embedding, gives: Vocabulary) -> None:
        super().__init__()
        self.inner = inner
        self.gives = gives

    def forward(self, ids: Tensor) -> Tensor:
        return self.gives.whole(self.inner(ids))

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight


def summed_once(layer: FusedLayer, x: Tensor, attend: Attend) -> Tensor:
    """A layer with parallel placement: one sum over ranks for attention and MLP together."""
    out, down = layer.out, layer.down
    assert isinstance(out, SummedLinear), "it is cut by columns"
    assert isinstance(down, SummedLinear), "it is cut by columns"
    own = layer.mlp_norm is not None
    normed = x if own else layer.attn_norm(x)
    share = out.partial(layer.attended(normed, layer.attn_norm if own else None, attend))
    rows, before = layer.activated(normed, layer.mlp_norm)
    y = down.whole(down.partial(rows, norm=before, add=share), x)
    return y if out.bias is None else y.add_(out.bias)


class SplitEmbedding(Embedding):
    """An embedding of which each rank has the rows of some tokens."""

    def __init__(self, weight: Recipe, kernels: Kernels, scale: float, first: int, group: Group) -> None:
        super().__init__(weight, kernels, scale)
        self.first = first
        """Token id of its first row."""
        self.group = group

    def rows(self, ids: Tensor, **options: Any) -> Tensor:
        local, count = ids - self.first, self.weight.shape[0]
        own = (local >= 0) & (local < count)
        found = super().rows(local.clamp(0, count - 1), scale=options.get("scale", 1.0))
        found = self.group.sum(torch.where(own[:, None], found, 0.0))
        table: Tensor | None = options.get("position_table")
        if table is None:
            return found
        return found.add_(F.embedding(options["positions"] + options["position_offset"], table))


class SplitNorm(Norm, Made):
    """A norm of this rank's heads: over all heads of all ranks together, or of each head with its own weights."""

    def __init__(self, norm: Norm, weight: Recipe, bias: Recipe | None) -> None:
        Made.__init__(self, {"weight": weight, "bias": bias})
        self.kind, self.eps, self.offset = norm.kind, norm.eps, norm.offset
        self.round_before_weight = norm.round_before_weight
        self._kernels = norm._kernels
        self.shares: tuple[Group, int, int] | None = None
        """For a norm over all heads: the ranks, the width of all heads, and how many ranks have the same heads."""

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if self.shares is None:
            return super().forward(x, add)
        assert add is None, "norms of heads add nothing"
        assert self.kind == "rms", "no family has a layer norm over all heads"
        assert self.weight is not None, "it has a recipe"
        group, width, copies = self.shares
        wide = x.float()
        total = group.sum(wide.square().sum(-1, keepdim=True).div_(copies))
        normed = wide * torch.rsqrt(total / width + self.eps)
        weight = self.weight.float() + self.offset
        return normed.to(x.dtype) * weight.to(x.dtype) if self.round_before_weight else (normed * weight).to(x.dtype)


class Values(Made):
    """A vector with a value for each head: attention sinks."""

    weight: nn.Parameter

    def __init__(self, weight: Recipe) -> None:
        super().__init__({"weight": weight})
