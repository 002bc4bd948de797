"""A rank's part of each weight: recipes of whole weights, cut."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from outpace.errors import ConfigError
from outpace.inject.policy import LayerSettings
from outpace.inject.recipe import Part, Portion, Recipe, Slice
from outpace.inject.split import Splits
from outpace.parallel.copies import Held, place_experts
from outpace.parallel.group import Group
from outpace.parallel.mesh import Mesh
from outpace.parallel.spans import Heads, Span, split_heads


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model on one rank."""

    mesh: Mesh
    splits: Splits
    """How each tensor is cut over the ranks of tensor parallelism."""
    same_tokens: bool = False
    """Whether all ranks that share experts have the same tokens."""
    expert_splits: Splits = field(default_factory=dict)
    """How each expert is cut over ranks with the same experts."""
    hot_experts: int = 0
    """Number of other ranks' experts that this rank holds copies of, in each layer."""
    load: tuple[tuple[float, ...], ...] = ()
    """Tokens of each expert, for each layer with experts: decides which experts are copied."""

    @property
    def ranks(self) -> Group:
        """The ranks that run the same batches."""
        return self.mesh.ep if self.same_tokens and self.mesh.ep.size > self.mesh.tp.size else self.mesh.tp

    @property
    def tp(self) -> Group:
        return self.mesh.tp

    def spans(self, name: str) -> tuple[int, tuple[Span, ...]] | None:
        """The dimension along which a tensor is cut, and this rank's spans of it; None: the tensor is whole."""
        split = self.splits.get(name)
        return None if split is None or self.tp.size == 1 else (split.dim, split.spans[self.tp.rank])

    def sizes(self, name: str) -> tuple[int, ...]:
        """Size of each rank's part of a cut tensor."""
        split = self.splits[name]
        assert split is not None, "it is cut"
        return split.sizes()

    def cut(self, recipe: Recipe) -> Recipe:
        if self.tp.size == 1:
            return recipe
        parts = tuple(part for same in _by_expert(recipe.parts) for part in self._cut_all(same))
        return recipe if parts == recipe.parts else replace(recipe, shape=_shape(parts, recipe), parts=parts)

    def cut_bias(self, bias: Recipe, whole: Recipe, own: Recipe) -> Recipe:
        """This rank's part of a bias. whole: its weight; own: this rank's part of the weight.

        A part of the weight without a bias leaves a gap of its width.
        """
        if own.shape == whole.shape:
            return bias
        starts: dict[tuple[int | None, int], int] = {}
        for same in _by_expert(whole.parts):
            start = 0
            for part in same:
                starts[part.expert, part.start] = start
                start += sum(each.shape_in_weight[each.dim] for each in self._cut(part, start) if each.dim == part.dim)
        parts = [
            each
            for part in bias.parts
            for each in self._cut(part, starts.get((part.expert, part.start), 0), columns=False)
        ]
        return replace(bias, shape=own.shape[:-1], parts=tuple(parts))

    def _cut_all(self, parts: list[Part]) -> Iterator[Part]:
        start = 0
        for part in parts:
            made = list(self._cut(part, start))
            yield from made
            start += sum(each.shape_in_weight[0] for each in made if each.dim == 0)

    def adds_up(self, recipe: Recipe) -> bool:
        """Whether products with this weight are summed over ranks: it is cut by columns."""
        found = self.spans(recipe.parts[0].name)
        if found is None:
            return False
        return recipe.parts[0].swapped(found[0]) == len(recipe.parts[0].shape) - 1

    @property
    def of_one_expert(self) -> "Shard":
        """This rank's part of each of its experts."""
        return Shard(Mesh(tp=self.mesh.expert_tp), self.expert_splits)

    @property
    def exchanges(self) -> bool:
        """Whether tokens are sent to other ranks for their experts."""
        return self.mesh.ep.size > 1 and not self.same_tokens

    def held_experts(self, count: int, layer: int) -> Held:
        """The experts of each rank. layer: number among the layers with experts."""
        if not self.hot_experts:
            return place_experts(count, self.mesh.ep.size)
        if layer >= len(self.load) or len(self.load[layer]) != count:
            has = f"{len(self.load[layer])} experts in row {layer}" if layer < len(self.load) else f"{layer} rows"
            raise ConfigError(
                f"moe.expert_load: layer {layer} of those with experts has {count} experts, and the load has {has}; "
                "give what LLM.expert_load() or /status/experts reports for this model"
            )
        return place_experts(count, self.mesh.ep.size, self.hot_experts, self.load[layer])

    def cut_experts(self, recipe: Recipe, count: int, layer: int) -> Recipe:
        """This rank's part of stacked experts."""
        if self.mesh.ep.size == 1:
            return self.cut(recipe)
        if self.mesh.expert_tp.size > 1 and self.expert_splits:
            recipe = self.of_one_expert.cut(recipe)
        return self.of_experts(recipe, count, layer)

    def of_experts(self, recipe: Recipe, count: int, layer: int) -> Recipe:
        """The weights, or biases, of this rank's experts, each expert whole."""
        held = self.held_experts(count, layer)[self.mesh.ep.rank]
        places = {expert: place for place, expert in enumerate(held)}
        parts: list[Part] = []
        for part in recipe.parts:
            if part.expert is not None:
                parts += [replace(part, expert=places[part.expert])] if part.expert in places else []
                continue
            for first, last in _runs(held):
                taken = Slice(0, first, last - first)
                parts.append(replace(part, expert=places[first], slices=(*part.slices, taken)))
        if len(parts) == len(recipe.parts):  # one run of experts fills the whole weight
            parts = [part if each.expert is not None else replace(part, expert=None)
                     for part, each in zip(parts, recipe.parts, strict=True)]  # fmt: skip
        return replace(recipe, shape=(len(held), *recipe.shape[1:]), parts=tuple(parts))

    def heads(self, whole: LayerSettings) -> Heads:
        return split_heads(whole.num_heads, whole.num_kv_heads, self.tp.size)[self.tp.rank]

    def copies(self, whole: LayerSettings) -> int:
        """How many ranks have the same key heads as this one."""
        every = split_heads(whole.num_heads, whole.num_kv_heads, self.tp.size)
        return sum(each.kv == every[self.tp.rank].kv for each in every)

    def settings(self, whole: LayerSettings) -> LayerSettings:
        """The numbers of this rank's part of a layer."""
        if self.tp.size == 1:
            return whole
        heads = self.heads(whole)
        return replace(whole, num_heads=heads.query[1] - heads.query[0], num_kv_heads=heads.kv[1] - heads.kv[0])

    def _cut(self, part: Part, start: int, *, columns: bool = True) -> Iterator[Part]:
        """This rank's rows or columns of a tensor. start: its first row in the weight. A bias has no columns."""
        found = self.spans(part.name)
        if found is None:
            yield replace(part, start=start) if part.dim == 0 else part
            return
        dim, spans = found
        row = part.swapped(dim)
        if columns and row == len(part.shape) - 1 and len(part.shape) > 1:
            (span,) = spans
            yield replace(part, start=start if part.dim == 0 else part.start, slices=(*part.slices, _slice(dim, span)))
            return
        before = start if row == 0 else 0
        for number, span in enumerate(spans):
            order = None if part.order is None else Portion(part.order, spans, number)
            at = 0 if order is not None else before
            yield replace(part, start=at, dim=row, order=order, slices=(*part.slices, _slice(dim, span)))
            before += span[1] - span[0]


def _slice(dim: int, span: Span) -> Slice:
    return Slice(dim, span[0], span[1] - span[0])


def _by_expert(parts: Iterable[Part]) -> Iterator[list[Part]]:
    found: dict[int | None, list[Part]] = {}
    for part in parts:
        found.setdefault(part.expert, []).append(part)
    yield from found.values()


def _runs(numbers: tuple[int, ...]) -> Iterator[Span]:
    """Ascending numbers as spans of consecutive numbers."""
    first = numbers[0]
    for number, after in zip(numbers, (*numbers[1:], None), strict=True):
        if after != number + 1:
            yield first, number + 1
            first = after if after is not None else first


def _shape(parts: tuple[Part, ...], whole: Recipe) -> tuple[int, ...]:
    """The shape of a weight that these parts fill."""
    one = [part for part in parts if part.expert == parts[0].expert]
    inner, dim = list(one[0].shape_in_weight), one[0].dim
    inner[dim] = sum(part.shape_in_weight[dim] for part in one)
    experts = () if parts[0].expert is None else (whole.shape[0],)
    assert math.prod(inner) > 0, "no rank's part is empty"
    return (*experts, *inner)
