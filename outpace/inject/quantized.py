"""Linears and experts whose weights are quantized: they bring products of their own, the rest stays as it is."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.inject.experts import Experts
from outpace.inject.modules import Before, Embedding, Linear, Made, Norm, fused_norm
from outpace.inject.recipe import Recipe
from outpace.kernels.activation import activation_kind
from outpace.kernels.dispatch import Kernels
from outpace.kernels.packed import Packed
from outpace.kernels.packed_linear import packed_choice, packed_linear_tiles
from outpace.kernels.packed_tiles import Tiles, rows_of_tiles, takes_tiles
from outpace.log import size_text
from outpace.parallel.group import ALONE, Group
from outpace.quant.plan import QuantPlan
from outpace.quant.rounding import as_packed


class PackedLinear(Linear):
    """A linear whose weight is kept by a scheme."""

    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None

    def __init__(self, weight: Recipe, bias: Recipe | None, kernels: Kernels) -> None:
        super().__init__(weight, bias, kernels)
        assert weight.scheme is not None, "a linear without a scheme is a PlainLinear"
        self.scheme = weight.scheme
        self.rows_kind = self.scheme.activations
        if self.scheme.symmetric:
            self.weight_zero = None
        self._packed: Packed | Tiles | None = None

    @property
    def packed(self) -> Packed | Tiles:
        """The weight as the kernels take it. Groups may be put in tiles at the first use, and stay so."""
        if self._packed is None or self._packed.values is not self.weight:
            self._packed = self._arranged()
        return self._packed

    def arrange(self) -> None:
        """Put the weight in its order now, and forget what was made of it: it is about to move."""
        assert self.packed is not None, "put in order"
        self._packed = None

    @torch.inference_mode(False)  # what is kept must serve outside of it too
    def _arranged(self) -> Packed | Tiles:
        weight = self.weight.detach()  # another thread may put it in tiles meanwhile
        shape, zero = (self.out_features, self.in_features), self.weight_zero
        if weight.dim() == 3:  # in tiles: by this linear, or by another that shares the weight
            return Tiles.again(self.weight, self.weight_scale, zero, shape, self.scheme.group or self.in_features)
        tensors = {"": weight, "_scale": self.weight_scale, **({} if zero is None else {"_zero": zero})}
        packed = as_packed(tensors, self.scheme, shape)
        tiled = self.rows_kind is None and self._kernels.packed_linear is packed_linear_tiles
        if not tiled or not takes_tiles(packed):
            return replace(packed, values=self.weight)
        tiles = Tiles.of(packed)
        self.weight.data = tiles.values
        return replace(tiles, values=self.weight)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """See `Linear`."""
        if x.dtype.itemsize == 1:
            raise ModelError(
                f"quant: a linear of {self.in_features} columns got rows of {x.dtype}: the model casts them to the "
                "dtype of a weight, which is quantized; name other linears in quant.weight.post_init_quant"
            )
        if options.get("norm") is None and x.shape[-1] != self.in_features:  # a gated activation halves its rows
            raise ModelError(f"model: a quantized linear of {self.in_features} columns got rows of {x.shape[-1]}")
        return super().forward(x, **options)

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """With the weight as it is kept."""
        if self.rows_kind is not None and self.rounds(len(x)):
            values, scales = self._kernels.quantize_rows(x, self.rows_kind)
            return self._scaled(values, scales, x.dtype, bias, add, out)
        result: Tensor = self._kernels.packed_linear(x, self.packed, bias=bias, add=add, out=out)
        return result

    def at_once(
        self, x: Tensor, before: Before | None, act: str | None, gated: bool, add: Tensor | None
    ) -> Tensor | None:
        """Rows quantized by what comes before, or few rows in one kernel."""
        if self.rows_kind is not None and self.rounds(len(x)):
            if before is None or act is not None:
                return None
            return self._scaled(*before.quantized(x, self.rows_kind), x.dtype, self.bias, add)
        if (act is not None and not gated) or not self._few(len(x)):
            return None
        fused = fused_norm(before) if isinstance(before, Norm) else {}
        if before is not None and not fused:
            x = before(x)
        kind = None if act is None else activation_kind(act)
        result: Tensor = self._kernels.packed_linear(x, self.packed, bias=self.bias, activation=kind, add=add, **fused)
        return result

    def rounds(self, rows: int) -> bool:
        """See `Linear`. A single row is left as it is where one kernel does all with it: that is faster, and exact."""
        alone = rows == 1 and self._kernels.gemv is not None and self._few(1)
        return self.rows_kind is not None and not alone

    def _few(self, rows: int) -> bool:
        """Whether one kernel does all with so many rows."""
        return isinstance(self.packed, Packed) and packed_choice(rows, self.packed) == "few"

    def _scaled(
        self,
        values: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The product of quantized rows."""
        result: Tensor = self._kernels.scaled_linear(
            values, scales, self.packed, bias=bias, add=add, out=out, dtype=dtype
        )
        return result

    def extra_repr(self) -> str:
        """What is printed of it."""
        return f"{self.in_features} -> {self.out_features}, {self.scheme}"


class PackedExperts(Experts):
    """Experts of which both stacks, or one of them, are kept by a scheme."""

    def __init__(self, *args: Any, **activation: Any) -> None:
        super().__init__(*args, **activation)
        kinds = {None if recipe.scheme is None else recipe.scheme.activations for recipe in self._stacks()}
        self.rows_kind = kinds.pop() if len(kinds) == 1 else None
        """What rows may be rounded to in steps of many tokens."""
        self._packed: dict[str, Packed] = {}

    def arrange(self) -> None:
        """Forget what was made of the weights: they are about to move."""
        self._packed.clear()

    def _stacks(self) -> list[Recipe]:
        return [self.recipes[name] for name in ("gate_up", "down")]

    def stack(self, name: str) -> Tensor | Packed:
        """The weights of all experts as the kernels take them."""
        weight, recipe = self._parameters[name], self.recipes[name]
        assert weight is not None, "both stacks have weights"
        if recipe.scheme is None:
            return weight
        found = self._packed.get(name)
        if found is None or found.values is not weight:
            _, rows, columns = recipe.shape
            tensors = {end: self._parameters[name + end] for end in recipe.scheme.tensors(recipe.shape)}
            kept = {end: tensor for end, tensor in tensors.items() if tensor is not None}
            found = self._packed[name] = as_packed(kept, recipe.scheme, (rows, columns))
        return found

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, add: Tensor | None = None) -> Tensor:
        """See `Experts`."""
        more = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias, "add": add, "out": add}
        stacks = self.stack("gate_up"), self.stack("down")
        result: Tensor = self._kernels.experts(
            x, *stacks, weights, chosen, rows=self.rows_kind, **self.activation, **more
        )
        return result

    def extra_repr(self) -> str:
        """What is printed of it."""
        schemes = (f"{name} {self.recipes[name].scheme or 'as it was'}" for name in ("gate_up", "down"))
        return f"{self.num_experts} experts, {', '.join(schemes)}"


class StandInExperts(nn.Module):
    """Our experts, quantized ones or those of a rank, behind the call of one of Hugging Face's stacks."""

    def __init__(self, experts: Experts, where: Callable[[Tensor], Tensor] | None = None, group: Group = ALONE) -> None:
        super().__init__()
        self.experts = experts
        self.where = where
        """From choices to its experts: others may be on other ranks. None: they are all here."""
        self.group = group
        """Ranks that have the same tokens, and other experts or other parts of them: their results are added up."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]: what the chosen experts make of each token, by their weights."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = top_k_index.int()
        chosen = chosen if self.where is None else self.where(chosen)
        result: Tensor = self.experts(rows, top_k_weights.float(), chosen)
        return self.group.sum(result).view(hidden_states.shape)


class PackedEmbedding(Embedding):
    """Rows of a table that is kept by a scheme."""

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
        """Of its rows."""
        return self._dtype

    def rows(self, ids: Tensor, **options: Any) -> Tensor:
        """Only the rows that are asked for are dequantized."""
        tensors = {"": self.weight, "_scale": self.weight_scale}
        if self.weight_zero is not None:
            tensors["_zero"] = self.weight_zero
        tiled = self.weight.dim() == 3  # by a head that shares it
        taken = {"": rows_of_tiles(self.weight, ids, self._width)} if tiled else {}
        for end, tensor in tensors.items():
            if end not in taken:
                taken[end] = _as_bytes(tensor).index_select(0, ids).view(tensor.dtype)
        table = as_packed(taken, self.scheme, (len(ids), self._width)).dequantized(self._dtype)
        rows: Tensor = self._kernels.embed(torch.arange(len(ids), device=ids.device), table, **options)
        return rows


def _as_bytes(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits as bytes: not every device takes rows of float8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@dataclass(frozen=True)
class Quantized:
    """What was quantized in a model."""

    schemes: tuple[str, ...]
    """The one that most weights have first."""
    weights: int
    before: int
    """Bytes of these weights in the model's dtype."""
    after: int
    plan: QuantPlan | None = None
    """What each weight got and why, where that was measured, now or before."""

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, plan: QuantPlan | None = None) -> "Quantized | None":
        """Looks at a model; None: nothing was."""
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
