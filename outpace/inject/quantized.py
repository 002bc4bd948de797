"""Linears, experts and embeddings with quantized weights."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.inject.experts import Experts
from outpace.inject.modules import Embedding, Linear, Made, Norm, Prologue, fused_norm
from outpace.inject.recipe import Recipe
from outpace.kernels.activation import activation_kind
from outpace.kernels.dispatch import Kernels
from outpace.kernels.packed import Packed
from outpace.kernels.packed_linear import packed_choice, packed_linear_tiles
from outpace.kernels.packed_tiles import TiledWeight, rows_of_tiles, takes_tiles
from outpace.log import size_text
from outpace.parallel.group import ALONE, Group
from outpace.quant.plan import QuantPlan
from outpace.quant.rounding import as_packed


class PackedLinear(Linear):
    """A linear with a quantized weight."""

    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None

    def __init__(self, weight: Recipe, bias: Recipe | None, kernels: Kernels) -> None:
        super().__init__(weight, bias, kernels)
        assert weight.scheme is not None, "a linear without a scheme is a PlainLinear"
        self.scheme = weight.scheme
        self.rows_kind = self.scheme.activations
        if self.scheme.symmetric:
            self.weight_zero = None
        self._packed: Packed | TiledWeight | None = None

    @property
    def packed(self) -> Packed | TiledWeight:
        """The weight as kernels take it. The first use may reorder it in tiles for good."""
        if self._packed is None or self._packed.values is not self.weight:
            self._packed = self._arranged()
        return self._packed

    def arrange(self) -> None:
        """Reorder the weight now, and drop cached views: the weight is about to move."""
        assert self.packed is not None, "reorders"
        self._packed = None

    @torch.inference_mode(False)  # the result is cached, and used outside of inference mode too
    def _arranged(self) -> Packed | TiledWeight:
        weight = self.weight.detach()  # its own data: another thread may reorder self.weight meanwhile
        shape, zero = (self.out_features, self.in_features), self.weight_zero
        if weight.dim() == 3:  # in tiles already, by this linear or another one with the same weight
            group = self.scheme.group or self.in_features
            return TiledWeight.of_tiles(self.weight, self.weight_scale, zero, shape, group)
        tensors = {"": weight, "_scale": self.weight_scale, **({} if zero is None else {"_zero": zero})}
        packed = as_packed(tensors, self.scheme, shape)
        tiled = self.rows_kind is None and self._kernels.packed_linear is packed_linear_tiles
        if not tiled or not takes_tiles(packed):
            return replace(packed, values=self.weight)
        tiles = TiledWeight.of(packed)
        self.weight.data = tiles.values
        return replace(tiles, values=self.weight)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if x.dtype.itemsize == 1:
            raise ModelError(
                f"quant: a linear of {self.in_features} columns got rows of {x.dtype}: the model casts them to the "
                "dtype of a weight, which is quantized; name other linears in quant.weight.post_init_quant"
            )
        if options.get("norm") is None and x.shape[-1] != self.in_features:  # a gated activation halves the columns
            raise ModelError(f"model: a quantized linear of {self.in_features} columns got rows of {x.shape[-1]}")
        return super().forward(x, **options)

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if self.rows_kind is not None and self.rounds(len(x)):
            values, scales = self._kernels.quantize_rows(x, self.rows_kind)
            return self._scaled(values, scales, x.dtype, bias=bias, add=add, out=out)
        result: Tensor = self._kernels.packed_linear(x, self.packed, bias=bias, add=add, out=out)
        return result

    def at_once(
        self, x: Tensor, before: Prologue | None, act: str | None, gated: bool, add: Tensor | None
    ) -> Tensor | None:
        """Input quantized by the kernel of the prologue, or one kernel for few rows."""
        if self.rows_kind is not None and self.rounds(len(x)):
            if before is None or act is not None:
                return None
            return self._scaled(*before.quantized(x, self.rows_kind), x.dtype, bias=self.bias, add=add)
        if (act is not None and not gated) or not self._few(len(x)):
            return None
        fused = fused_norm(before) if isinstance(before, Norm) else {}
        if before is not None and not fused:
            x = before(x)
        kind = None if act is None else activation_kind(act)
        result: Tensor = self._kernels.packed_linear(x, self.packed, bias=self.bias, activation=kind, add=add, **fused)
        return result

    def rounds(self, rows: int) -> bool:
        """See `Linear`. A single row is not quantized if one kernel does everything: faster, and exact."""
        alone = rows == 1 and self._kernels.gemv is not None and self._few(1)
        return self.rows_kind is not None and not alone

    def _few(self, rows: int) -> bool:
        """Whether one kernel does everything for this many rows."""
        return isinstance(self.packed, Packed) and packed_choice(rows, self.packed) == "few"

    def _scaled(self, values: Tensor, scales: Tensor, dtype: torch.dtype, **options: Tensor | None) -> Tensor:
        result: Tensor = self._kernels.scaled_linear(values, scales, self.packed, dtype=dtype, **options)
        return result

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.scheme}"


class PackedExperts(Experts):
    """Experts with one or both stacks quantized."""

    def __init__(self, *args: Any, **activation: Any) -> None:
        super().__init__(*args, **activation)
        stacks = [self.recipes[name] for name in ("gate_up", "down")]
        kinds = {None if recipe.scheme is None else recipe.scheme.activations for recipe in stacks}
        self.rows_kind = kinds.pop() if len(kinds) == 1 else None
        self._packed: dict[str, Packed] = {}

    def arrange(self) -> None:
        """Drop cached views: the weights are about to move."""
        self._packed.clear()

    def stack(self, name: str) -> Tensor | Packed:
        weight, recipe = super().stack(name), self.recipes[name]
        if recipe.scheme is None:
            return weight
        found = self._packed.get(name)
        if found is None or found.values is not weight:
            _, rows, columns = recipe.shape
            tensors = {end: self._parameters[name + end] for end in recipe.scheme.tensors(recipe.shape)}
            kept = {end: tensor for end, tensor in tensors.items() if tensor is not None}
            found = self._packed[name] = as_packed(kept, recipe.scheme, (rows, columns))
        return found

    def extra_repr(self) -> str:
        schemes = (f"{name} {self.recipes[name].scheme or 'as it was'}" for name in ("gate_up", "down"))
        return f"{self.num_experts} experts, {', '.join(schemes)}"


class StandInExperts(nn.Module):
    """Our experts, quantized or of one rank, with the forward of the stack of Hugging Face's that they replace."""

    def __init__(self, experts: Experts, where: Callable[[Tensor], Tensor] | None = None, group: Group = ALONE) -> None:
        super().__init__()
        self.experts = experts
        self.where = where
        """Maps choices to this rank's experts; None: all experts are on this rank."""
        self.group = group
        """Ranks with the same tokens and other (parts of) experts: their results are summed."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]: the weighted sum of the chosen experts."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = top_k_index.int()
        chosen = chosen if self.where is None else self.where(chosen)
        result: Tensor = self.experts(rows, top_k_weights.float(), chosen)
        return self.group.sum(result).view(hidden_states.shape)


class PackedEmbedding(Embedding):
    """Rows of a quantized table."""

    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None

    def __init__(self, weight: Recipe, kernels: Kernels, scale: float, dtype: torch.dtype) -> None:
        super().__init__(weight, kernels, scale)
        assert weight.scheme is not None, "an embedding without a scheme is a plain one"
        assert weight.scheme.block_rows == 1, "rows are taken one by one"
        self.scheme, self._dtype, self._width = weight.scheme, dtype, weight.shape[1]
        if self.scheme.symmetric:
            self.weight_zero = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def rows(self, ids: Tensor, **options: Any) -> Tensor:
        """See `Embedding`. Dequantizes these rows only."""
        tensors = {"": self.weight, "_scale": self.weight_scale}
        if self.weight_zero is not None:
            tensors["_zero"] = self.weight_zero
        tiled = self.weight.dim() == 3  # reordered by a head with the same weight
        taken = {"": rows_of_tiles(self.weight, ids, self._width)} if tiled else {}
        for end, tensor in tensors.items():
            if end not in taken:
                taken[end] = float8_as_bytes(tensor).index_select(0, ids).view(tensor.dtype)
        table = as_packed(taken, self.scheme, (len(ids), self._width)).dequantized(self._dtype)
        rows: Tensor = self._kernels.embed(torch.arange(len(ids), device=ids.device), table, **options)
        return rows


def float8_as_bytes(tensor: Tensor) -> Tensor:
    """float8 as bytes, because not every device can index or copy float8; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@dataclass(frozen=True)
class QuantizedReport:
    """What was quantized in a model."""

    schemes: tuple[str, ...]
    """The most frequent first."""
    weights: int
    before: int
    """Bytes of these weights in the model's dtype."""
    after: int
    plan: QuantPlan | None = None
    """Scheme of each weight and why, if they were measured."""

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, plan: QuantPlan | None = None) -> "QuantizedReport | None":
        """The report of a model; None: nothing is quantized."""
        made = [module for module in model.modules() if isinstance(module, Made)]
        every = [recipe for module in made for recipe in module.recipes.values() if recipe.scheme is not None]
        recipes = list(dict.fromkeys(every))  # a head and an embedding may share one
        if not recipes:
            return None
        counts = Counter(str(recipe.scheme) for recipe in recipes)
        before = sum(torch.Size(recipe.shape).numel() for recipe in recipes) * dtype.itemsize
        after = sum(recipe.scheme.nbytes(recipe.shape) for recipe in recipes if recipe.scheme is not None)
        return cls(tuple(name for name, _ in counts.most_common()), len(recipes), before, after, plan)

    def __str__(self) -> str:
        sizes = f"{size_text(self.before)} became {size_text(self.after)}"
        return f"{'; '.join(self.schemes)} ({self.weights} weights, {sizes})"
