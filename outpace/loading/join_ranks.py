"""Joins the tensors of several ranks to whole ones, as sources with several pieces; nothing is copied."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.errors import ModelError
from outpace.loading.regions import cut, join
from outpace.loading.strict_json import parse
from outpace.loading.weights import Source
from outpace.parallel.spans import Split

Shape = tuple[int, ...]
Splits = Callable[[int], Mapping[str, Split | None]]
"""Number of ranks -> how each tensor of the model is split over them, by name."""
_FUSED = "query_key_value"
_SPLIT: Mapping[str, int] = {
    "attention.dense.weight": 1,
    "mlp.dense_4h_to_h.weight": 1,
    "query_key_value": 0,
    "mlp.dense_h_to_4h": 0,
    "word_embeddings.weight": 0,
    "final_linear.weight": 0,
    "output_layer.weight": 0,
}
"""Part of a Megatron tensor name -> dimension in which ranks split it. Each rank has all other tensors whole."""


def join_ranks(
    origin: str, ranks: Sequence[Mapping[str, Source]], *, version: float, wanted: "Wanted"
) -> dict[str, Source]:
    """The whole tensors of several ranks. version: Megatron's layout of fused query, key and value."""
    if len(ranks) == 1:
        return dict(ranks[0])
    for rank, sources in enumerate(ranks):
        if differing := sources.keys() ^ ranks[0].keys():
            name = min(differing)
            where = f"rank {rank} {'has' if name in sources else 'lacks'}"
            raise ModelError(f"{origin}: {name[:200]!r}: {where} it, unlike rank 0; save the checkpoint again")
    splits = wanted.splits(len(ranks)) if wanted.splits is not None else {}
    joined = {}
    for name in ranks[0]:
        where, parts = f"{origin}: {name[:200]!r}", [rank[name] for rank in ranks]
        shape, split = wanted.shape(name), splits.get(name)
        if shape is not None and split is not None and _fits(split, parts, shape):
            held = [RankPart(shape, split.dim, spans) for spans in split.spans]
            joined[name] = join_parts(where, list(zip(held, parts, strict=True)))
        else:
            joined[name] = _join(where, name, parts, shape, version)
    return joined


def _fits(split: Split, parts: Sequence[Source], shape: Shape) -> bool:
    """Whether the ranks' shapes are those of this split of the model."""
    own = [(*shape[: split.dim], size, *shape[split.dim + 1 :]) for size in split.sizes()]
    return [part.shape for part in parts] == own and len({part.dtype for part in parts}) == 1


class Wanted:
    """Shapes and splits of the model's tensors, looked up by names of a checkpoint, which may lack or add a prefix."""

    def __init__(self, shapes: Mapping[str, Shape], splits: Splits | None = None) -> None:
        self.shapes = shapes
        self.splits = splits
        self.by_end: dict[str, set[Shape]] = {}
        for name, shape in shapes.items():
            for end in _ends(name):
                self.by_end.setdefault(end, set()).add(tuple(shape))

    def shape(self, name: str) -> Shape | None:
        """The shape of the model's tensor; None: unknown."""
        if found := next((end for end in (name, *_ends(name)) if end in self.shapes), None):
            return tuple(self.shapes[found])
        longer = self.by_end.get(name, set())
        return next(iter(longer)) if len(longer) == 1 else None


def _ends(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _join(where: str, name: str, parts: list[Source], wanted: Shape | None, version: float) -> Source:
    dtypes = {part.dtype for part in parts}
    ranks = {len(part.shape) for part in parts}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise ModelError(f"{where}: ranks hold it in several dtypes or numbers of dimensions; save it again")
    dim = _by_name(where, name, parts) if wanted is None else _by_shape(where, parts, wanted)
    if dim is None:
        return parts[0]
    groups = 3 if version == 0 and _FUSED in name else 1
    sizes = [part.shape[dim] // groups for part in parts]
    if any(size * groups != part.shape[dim] for size, part in zip(sizes, parts, strict=True)):
        raise ModelError(f"{where}: ranks do not hold three equal parts, as in version 0; check the version")
    return join(
        [
            cut(part, dim, group * size, (group + 1) * size)
            for group in range(groups)
            for part, size in zip(parts, sizes, strict=True)
        ],
        dim,
    )


def _by_shape(where: str, parts: list[Source], wanted: Shape) -> int | None:
    """The dimension in which the ranks' parts are split; None: each rank has the whole tensor."""
    shapes = [part.shape for part in parts]
    if all(shape == wanted for shape in shapes):
        return None
    dims = range(len(wanted)) if len(wanted) == len(shapes[0]) else ()
    differing = [dim for dim in dims if any(shape[dim] != wanted[dim] for shape in shapes)]
    dim = differing[0] if len(differing) == 1 else None
    if dim is None or sum(shape[dim] for shape in shapes) != wanted[dim]:
        raise ModelError(
            f"{where}: shapes of ranks {shapes[:4]} do not add up to the model's {wanted}; check the config"
        )
    return dim


def _by_name(where: str, name: str, parts: list[Source]) -> int | None:
    dim = next((dim for part, dim in _SPLIT.items() if part in name), None)
    shapes = [part.shape for part in parts]
    if dim is None:
        if len(set(shapes)) > 1:
            raise ModelError(f"{where}: ranks hold the shapes {shapes[:4]}, and its name does not say how to join them")
        if len(shapes[0]) > 1 and "position_embeddings" not in name:
            raise ModelError(
                f"{where}: neither its name nor a tensor of the model shows how ranks split it; check that the "
                "checkpoint belongs to this model"
            )
        return None
    if len(shapes[0]) <= dim or len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ModelError(f"{where}: shapes of ranks {shapes[:4]} cannot be joined in dimension {dim}; save it again")
    return dim


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a tensor in a file of `outpace shard`: consecutive ranges of one dimension."""

    shape: Shape
    dim: int
    ranges: tuple[tuple[int, int], ...]


def read_parts(path: object, text: str) -> dict[str, RankPart]:
    """The parts that a file's metadata describe."""
    try:
        return {name: _part(value) for name, value in parse(text.encode()).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"model: {path}: regions in its metadata are damaged ({error}); shard the model again"
        ) from error


def _part(found: Any) -> RankPart:
    shape, dim, ranges = found["shape"], found["dim"], [tuple(each) for each in found["ranges"]]
    numbers = [*shape, dim, *(bound for each in ranges for bound in each)]
    if len(found) != 3 or any(type(number) is not int or number < 0 for number in numbers) or dim >= len(shape):
        raise ValueError("they are not a shape, a dimension and ranges")
    if any(len(each) != 2 or not each[0] <= each[1] <= shape[dim] for each in ranges):
        raise ValueError("a range is not [start, stop] inside the shape")
    return RankPart(tuple(shape), dim, tuple(ranges))


def join_parts(where: str, held: Sequence[tuple[RankPart, Source]]) -> Source:
    """Join the parts in files of `outpace shard`. Overlaps are used once; gaps are an error."""
    part, first = held[0]
    stretches: list[tuple[int, int, int, Source]] = []
    for own, source in held:
        length = sum(stop - start for start, stop in own.ranges)
        stored = (*own.shape[: own.dim], length, *own.shape[own.dim + 1 :])
        if (own.shape, own.dim) != (part.shape, part.dim) or source.shape != stored or source.dtype != first.dtype:
            raise ModelError(f"{where}: its parts do not fit together; shard the model again")
        begin = 0
        for start, stop in own.ranges:
            stretches.append((start, stop, begin, source))
            begin += stop - start
    taken: list[Source] = []
    end = 0
    for start, stop, begin, source in sorted(stretches, key=lambda stretch: stretch[:2]):
        if start > end:
            break
        if stop > end:
            taken.append(cut(source, part.dim, begin + end - start, begin + stop - start))
            end = stop
    if end != part.shape[part.dim]:
        raise ModelError(f"{where}: no rank holds index {end} of dimension {part.dim}; shard the model again")
    return join(taken, part.dim) if taken else first
