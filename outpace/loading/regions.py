"""Cuts, joins, stacks and transposes sources without reading them, by changing their regions.

`Traced` tensors have no values: Hugging Face's conversion operations run on them as on ordinary tensors, and the result
says where each part is stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from outpace.loading.weights import Piece, Region, Source


class Inexpressible(Exception):
    """Regions cannot express this operation; the tensor has to be read and computed."""


def cut(source: Source, dim: int, start: int, stop: int) -> Source:
    """source[start:stop] along one dimension."""
    dim = dim % len(source.shape)
    pieces = (_cut(piece, _full(piece.into, source.shape), dim, start, stop) for piece in source.pieces)
    shape = (*source.shape[:dim], stop - start, *source.shape[dim + 1 :])
    return _source(shape, source.dtype, [found for found in pieces if found is not None])


def join(sources: Sequence[Source], dim: int) -> Source:
    """Concatenate sources along one dimension."""
    shape = list(sources[0].shape)
    dim = dim % len(shape)
    shape[dim] = 0
    pieces = []
    for source in sources:
        for piece, into in _placed(source):
            pieces.append(replace(piece, into=_with(into, dim, _moved(into[dim], shape[dim]))))
        shape[dim] += source.shape[dim]
    return _source(tuple(shape), _dtype(sources), pieces)


def stack(sources: Sequence[Source], dim: int) -> Source:
    dim = dim % (len(sources[0].shape) + 1)
    pieces = [
        replace(piece, into=(*into[:dim], number, *into[dim:]))
        for number, source in enumerate(sources)
        for piece, into in _placed(source)
    ]
    shape = sources[0].shape
    return _source((*shape[:dim], len(sources), *shape[dim:]), _dtype(sources), pieces)


def transpose(source: Source, dim0: int, dim1: int) -> Source:
    first, second = sorted((dim0 % len(source.shape), dim1 % len(source.shape)))
    shape = list(source.shape)
    shape[first], shape[second] = shape[second], shape[first]
    pieces = [
        replace(
            piece,
            into=_with(_with(into, first, into[second]), second, into[first]),
            swap=_swapped(piece, into, first, second),
        )
        for piece, into in _placed(source)
    ]
    return _source(tuple(shape), source.dtype, pieces)


def _placed(source: Source) -> Iterator[tuple[Piece, Region]]:
    for piece in source.pieces:
        yield piece, _full(piece.into, source.shape)


def _source(shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece]) -> Source:
    """A source in which regions that cover everything are written as ()."""
    return Source(
        shape,
        dtype,
        tuple(replace(piece, take=_short(piece.take, piece.shape), into=_short(piece.into, shape)) for piece in pieces),
    )


def _dtype(sources: Sequence[Source]) -> torch.dtype:
    return reduce(torch.promote_types, (source.dtype for source in sources))


def _full(region: Region, shape: tuple[int, ...]) -> Region:
    """The region with an entry for each dimension and slices with both ends."""
    given = [
        slice(*part.indices(size)[:2]) if isinstance(part, slice) else part % size
        for part, size in zip(region, shape, strict=False)
    ]
    return (*given, *(slice(0, size) for size in shape[len(given) :]))


def _short(region: Region, shape: tuple[int, ...]) -> Region:
    full = _full(region, shape)
    return () if full == tuple(slice(0, size) for size in shape) else full


def _with(region: Region, dim: int, part: slice | int) -> Region:
    return (*region[:dim], part, *region[dim + 1 :])


def _moved(part: slice | int, by: int) -> slice | int:
    return slice(part.start + by, part.stop + by) if isinstance(part, slice) else part + by


def _slices(region: Region) -> list[int]:
    """The dimensions that remain after indexing with the region."""
    return [dim for dim, part in enumerate(region) if isinstance(part, slice)]


def _cut(piece: Piece, into: Region, dim: int, start: int, stop: int) -> Piece | None:
    """The part of a piece inside of the cut; None: there is none."""
    place = into[dim]
    if isinstance(place, int):
        return replace(piece, into=_with(into, dim, place - start)) if start <= place < stop else None
    low, high = max(place.start, start), min(place.stop, stop)
    if low >= high:
        return None
    content = _slices(into).index(dim)
    if piece.swap is not None and content in piece.swap:
        content = piece.swap[0] + piece.swap[1] - content
    take = _full(piece.take, piece.shape)
    stored = _slices(take)[content]
    begin = take[stored].start  # type: ignore[union-attr]
    part = slice(begin + low - place.start, begin + high - place.start)
    return replace(piece, take=_with(take, stored, part), into=_with(into, dim, slice(low - start, high - start)))


def _swapped(piece: Piece, into: Region, first: int, second: int) -> tuple[int, int] | None:
    """The piece's `swap` after two dimensions of its tensor are exchanged."""
    kept = _slices(into)
    if first == second or (first not in kept and second not in kept):
        return piece.swap
    if first not in kept or second not in kept:
        if any(first < dim < second for dim in kept):
            raise Inexpressible("a transpose that moves one dimension past others")
        return piece.swap
    swap = (kept.index(first), kept.index(second))
    if piece.swap is None:
        return swap
    if set(piece.swap) == set(swap):
        return None
    raise Inexpressible("two transposes of different dimensions")


class Traced(Tensor):
    """A tensor on the meta device with the source of its values. Operations that regions cannot express raise."""

    source: Source

    @staticmethod
    def of(source: Source) -> "Traced":
        tensor = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(Traced)
        tensor.source = source
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation on meta tensors, which checks it and computes shapes, then on the sources."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else (result,)
        if not any(isinstance(value, Tensor) for value in results):
            return result  # a query of the shape or dtype
        operation = _OPERATIONS.get(func.__name__)
        if operation is None:
            raise Inexpressible(func.__name__)
        traced = tuple(map(Traced.of, operation(results, *args, **(kwargs or {}))))
        return traced if isinstance(result, list | tuple) else traced[0]


def _split(results: Sequence[Tensor], tensor: Traced, _: int | Sequence[int], dim: int = 0) -> list[Source]:
    parts, start = [], 0
    for result in results:
        parts.append(cut(tensor.source, dim, start, start + result.shape[dim]))
        start += result.shape[dim]
    return parts


_OPERATIONS: Mapping[str, Callable[..., list[Source]]] = {
    "cat": lambda _, tensors, dim=0: [join([tensor.source for tensor in tensors], dim)],
    "stack": lambda _, tensors, dim=0: [stack([tensor.source for tensor in tensors], dim)],
    "transpose": lambda _, tensor, dim0, dim1: [transpose(tensor.source, dim0, dim1)],
    "chunk": _split,
    "split": _split,
    "contiguous": lambda _, tensor: [tensor.source],
    "detach": lambda _, tensor: [tensor.source],
}
