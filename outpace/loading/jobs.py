"""Pairs each stored piece of a checkpoint with its place in a weight, as a view in the shape of the stored tensor."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from outpace.inject.recipe import Part, Recipe
from outpace.loading.weights import Piece, Region, Source

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Bytes to read, and their destination."""

    piece: Piece
    box: Box
    """The region of the stored tensor to read."""
    place: Tensor
    """The destination, as a view with the dimensions of the stored tensor."""
    rows: Tensor | None = None
    """Destination row of each row that is read; None: in order."""
    dim: int = 0
    """The dimension of the stored tensor that `rows` refers to."""

    @property
    def nbytes(self) -> int:
        return self.piece.dtype.itemsize * math.prod(stop - start for start, stop in self.box)

    @property
    def direct(self) -> bool:
        """Whether the bytes can be copied without conversion."""
        shape = self.piece.shape
        in_a_row = all(span == (0, size) for span, size in zip(self.box[1:], shape[1:], strict=True))
        same = self.rows is None and self.place.dtype == self.piece.dtype
        return same and in_a_row and self.place.is_contiguous()

    def runs(self, limit: int) -> Iterator["Run"]:
        """Split into runs of whole rows of at most `limit` bytes (or one row, if a row is larger)."""
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
        """Copy the rows of a run [stop - start, ...] to their destination."""
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
    """Consecutive bytes of a stored tensor, and the rows that they hold."""

    offset: int
    nbytes: int
    prefix: tuple[int, ...]
    start: int
    stop: int


def jobs(recipe: Recipe, weight: Tensor, sources: Mapping[str, Source]) -> Iterator[Job]:
    """The jobs that fill a weight. Parts without a source get none."""
    for part in recipe.parts:
        for piece in sources[part.name].pieces if part.name in sources else ():
            job = _fit(part, piece, weight)
            if job is not None:
                yield job


def _fit(part: Part, piece: Piece, weight: Tensor) -> Job | None:
    """The job for one piece; None: the weight does not use it."""
    piece = piece if piece.shape else _one_dim(piece)
    into, single = _box(piece.into, part.shape)
    take, dropped = _box(piece.take, piece.shape)
    cut = _cut(part, into)
    if cut is None:
        return None
    lows, highs = cut
    # dimension of the model's tensor -> dimension of the stored tensor
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
    """(starts, stops) of the overlap of a region of the model's tensor with the part's slices; None: no overlap."""
    lows, highs = [low for low, _ in into], [high for _, high in into]
    for each in part.slices:
        dim, first = each.dim, each.start
        lows[dim], highs[dim] = max(lows[dim], first), min(highs[dim], first + each.length)
        if lows[dim] >= highs[dim]:
            return None
    return lows, highs


def _box(region: Region, shape: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[int]]:
    """A region as (start, stop) in each dimension, and the dimensions that an integer index drops."""
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
    """A stored scalar as a vector with one element."""
    place = piece.place
    return replace(piece, place=(lambda: place().reshape(1)) if callable(place) else place, shape=(1,), take=(0,))


def as_rows(job: Job, run: Run, data: Tensor) -> Tensor:
    """The bytes of a run as rows of the stored tensor."""
    rest = job.piece.shape[len(run.prefix) + 1 :]
    return data.view(job.piece.dtype).view(run.stop - run.start, *rest)


def flat(place: Tensor) -> Tensor:
    """A contiguous tensor as bytes."""
    return place.as_strided((place.numel(),), (1,)).view(torch.uint8)
