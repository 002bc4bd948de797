"""Where the pieces of a checkpoint go: each one beside its place in a weight, in the shape that it is stored in."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from outpace.inject.recipe import Part, Recipe
from outpace.loading.weights import Piece, Region, Source

Box = tuple[tuple[int, int], ...]
"""Start and stop in each dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Bytes to read, and where they go."""

    piece: Piece
    box: Box
    """What is taken of the stored tensor."""
    place: Tensor
    """What it fills, with the dimensions of the stored tensor."""
    rows: Tensor | None = None
    """The row of the place that each taken one is; None: in order."""
    dim: int = 0
    """Where rows are: which dimension of the stored tensor they are."""

    @property
    def nbytes(self) -> int:
        """Of what is taken."""
        return self.piece.dtype.itemsize * math.prod(stop - start for start, stop in self.box)

    @property
    def direct(self) -> bool:
        """Whether the bytes can be copied as they are."""
        shape = self.piece.shape
        in_a_row = all(span == (0, size) for span, size in zip(self.box[1:], shape[1:], strict=True))
        same = self.rows is None and self.place.dtype == self.piece.dtype
        return same and in_a_row and self.place.is_contiguous()

    def runs(self, limit: int) -> Iterator["Run"]:
        """The bytes in runs of whole rows that take no more than `limit`, as far as a row does not."""
        shape, size = self.piece.shape, self.piece.dtype.itemsize
        depth = 0
        while depth < len(shape) - 1 and size * math.prod(shape[depth + 1 :]) > limit:
            depth += 1
        row = size * math.prod(shape[depth + 1 :])
        first, last = self.box[depth]
        step = max(1, limit // row) if row else max(1, last - first)
        for prefix in product(*(range(*span) for span in self.box[:depth])):
            before = 0
            for index, length in zip(prefix, shape, strict=False):
                before = before * length + index
            for start in range(first, last, step):
                stop = min(start + step, last)
                yield Run((before * shape[depth] + start) * row, (stop - start) * row, prefix, start, stop)

    def write(self, run: "Run", values: Tensor) -> None:
        """Put the rows of a run [stop - start, ...] in their place."""
        depth = len(run.prefix)
        for dim, (start, stop) in enumerate(self.box[depth + 1 :], 1):
            values = values.narrow(dim, start, stop - start)
        at = [index - start for index, (start, _) in zip(run.prefix, self.box, strict=False)]
        first, last = run.start - self.box[depth][0], run.stop - self.box[depth][0]
        if self.rows is None or self.dim < depth:
            if self.rows is not None:
                at[self.dim] = int(self.rows[at[self.dim]])
            self.place[tuple(at)].narrow(0, first, last - first).copy_(values)
        elif self.dim == depth:
            self.place[tuple(at)].index_copy_(0, self.rows[first:last], values.to(self.place.dtype))
        else:
            rows = self.place[tuple(at)].narrow(0, first, last - first)
            rows.index_copy_(self.dim - depth, self.rows, values.to(self.place.dtype))


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of a stored tensor, and which of its rows they are."""

    offset: int
    nbytes: int
    prefix: tuple[int, ...]
    start: int
    stop: int


def jobs(recipe: Recipe, weight: Tensor, sources: Mapping[str, Source]) -> Iterator[Job]:
    """All that fills a weight from a checkpoint."""
    for part in recipe.parts:
        for piece in sources[part.name].pieces if part.name in sources else ():
            job = _fit(part, piece, weight)
            if job is not None:
                yield job


def _fit(part: Part, piece: Piece, weight: Tensor) -> Job | None:
    """A piece beside its place; None: this weight takes nothing of it."""
    piece = piece if piece.shape else _one_dim(piece)
    into, single = _box(piece.into, part.shape)
    take, dropped = _box(piece.take, piece.shape)
    cut = _cut(part, into)
    if cut is None:
        return None
    lows, highs = cut
    # Which dimension of what is stored each dimension of the model's tensor is
    kept = [dim for dim in range(len(piece.shape)) if dim not in dropped]
    if piece.swap is not None:
        a, b = piece.swap
        kept[a], kept[b] = kept[b], kept[a]
    dims = dict(zip([dim for dim in range(len(part.shape)) if dim not in single], kept, strict=True))
    for dim, stored in dims.items():
        begin = take[stored][0] - into[dim][0]
        take[stored] = (begin + lows[dim], begin + highs[dim])
    begins = [0] * len(part.shape)
    for each in part.slices:
        begins[each.dim] = each.start
    spans = [(low - begin, high - begin) for low, high, begin in zip(lows, highs, begins, strict=True)]
    place, rows, dim = part.place(weight), None, 0
    ordered = None if part.order is None else part.rows_dim
    for axis, (low, high) in enumerate(spans):
        if axis == ordered and part.order is not None:
            rows, dim = part.order.rows()[low:high].to(weight.device), dims[axis]
        else:
            place = place.narrow(axis, low, high - low)
    place = place.squeeze(tuple(single)) if single else place
    place = place.transpose(*piece.swap) if piece.swap is not None else place
    for axis in dropped:
        place = place.unsqueeze(axis)
    return Job(piece, tuple(take), place, rows, dim)


def _cut(part: Part, into: list[tuple[int, int]]) -> tuple[list[int], list[int]] | None:
    """What of a region of the model's tensor the slice wants; None: nothing."""
    lows, highs = [low for low, _ in into], [high for _, high in into]
    for each in part.slices:
        dim, first = each.dim, each.start
        lows[dim], highs[dim] = max(lows[dim], first), min(highs[dim], first + each.length)
        if lows[dim] >= highs[dim]:
            return None
    return lows, highs


def _box(region: Region, shape: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[int]]:
    """A region as start and stop of every dimension, and the dimensions that an index drops."""
    spans, dropped = [(0, size) for size in shape], []
    for dim, index in enumerate(region):
        if isinstance(index, int):
            spans[dim] = (index, index + 1)
            dropped.append(dim)
        else:
            start, stop, _ = index.indices(shape[dim])
            spans[dim] = (start, stop)
    return spans, dropped


def _one_dim(piece: Piece) -> Piece:
    """A stored number as the only element of a vector."""
    place = piece.place
    return replace(piece, place=(lambda: place().reshape(1)) if callable(place) else place, shape=(1,), take=(0,))


def as_rows(job: Job, run: Run, data: Tensor) -> Tensor:
    """The bytes of a run as the rows that they are."""
    rest = job.piece.shape[len(run.prefix) + 1 :]
    return data.view(job.piece.dtype).view(run.stop - run.start, *rest)


def flat(place: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return place.as_strided((place.numel(),), (1,)).view(torch.uint8)
