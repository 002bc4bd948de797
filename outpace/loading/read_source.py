"""Reads a whole source into host memory with plain reads, for conversions, comparisons and tests."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.regions import cut
from outpace.loading.unchanged import unreadable
from outpace.loading.weights import Extent, Piece, Source

_AT_ONCE = 64 * 2**20
"""Bytes of each source that are in memory while two are compared."""


def read(source: Source) -> Tensor:
    """The tensor, in the dtype of the source."""
    tensor = torch.empty(source.shape, dtype=source.dtype)
    for piece in source.pieces:
        content = _take(piece)
        tensor[piece.into].copy_(content if piece.swap is None else content.transpose(*piece.swap))
    return tensor


def same(first: Source, second: Source, dtype: torch.dtype) -> bool:
    """Whether two sources of one shape are equal after conversion to a dtype; never holds both in memory."""
    if first == second:
        return True
    if not first.shape:
        return torch.equal(read(first).to(dtype), read(second).to(dtype))
    rows, size = first.shape[0], max(1, math.prod(first.shape[1:]) * max(first.dtype.itemsize, second.dtype.itemsize))
    step = rows if _made(first) or _made(second) else max(1, _AT_ONCE // size)
    for start in range(0, rows, max(1, step)):
        stop = min(rows, start + step)
        parts = (read(cut(source, 0, start, stop)).to(dtype) for source in (first, second))
        if not torch.equal(*parts):
            return False
    return True


def _made(source: Source) -> bool:
    """Whether a piece is computed, so that reading it in parts would compute it repeatedly."""
    return any(not isinstance(piece.place, Extent) for piece in source.pieces)


def _take(piece: Piece) -> Tensor:
    """The stored region of a piece; only the needed rows of a file are read."""
    if not isinstance(piece.place, Extent):
        make: Callable[[], Tensor] = piece.place
        return make()[piece.take]
    take, shape = piece.take, piece.shape
    if not take or not isinstance(take[0], slice):
        return _bytes(piece.place, 0, math.prod(shape), piece.dtype).view(shape)[take]
    start, stop, _ = take[0].indices(shape[0])
    row = math.prod(shape[1:])
    rows = _bytes(piece.place, start * row, (stop - start) * row, piece.dtype)
    return rows.view(stop - start, *shape[1:])[(slice(None), *take[1:])]


def _bytes(place: Extent, skip: int, elements: int, dtype: torch.dtype) -> Tensor:
    """`elements` values of a file, after `skip` others."""
    buffer = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
    target, done = memoryview(buffer.numpy()), 0  # type: ignore[arg-type]
    try:
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset + skip * dtype.itemsize)
            while done < len(target):
                if not (count := file.readinto(target[done:])):
                    raise ModelError(f"model: {place.path} ends too early; download it again")
                done += count
    except OSError as error:
        raise unreadable(place.path, error) from error
    return buffer.view(dtype)
