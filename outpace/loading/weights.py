"""What a checkpoint holds, known without reading it: tensors by name, each a piece of some file or several."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Region = tuple[slice | int, ...]
"""Part of a tensor, as in `tensor[region]`; (): all of it. Slices have a step of 1."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file, row after row, little-endian."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, or a region of it, and the region of a wanted tensor that it is.

    wanted[into] = stored[take], or its transpose(*swap).
    """

    place: Extent | Callable[[], Tensor]
    """Where its bytes are, or what makes it on the host when it is wanted: mapped, dequantized, converted."""
    shape: tuple[int, ...]
    """As it is stored."""
    dtype: torch.dtype
    take: Region = ()
    swap: tuple[int, int] | None = None
    into: Region = ()

    @property
    def nbytes(self) -> int:
        """Of what is taken."""
        parts = zip(self.take, self.shape, strict=False)
        spans = (len(range(size)[part]) if isinstance(part, slice) else 1 for part, size in parts)
        return self.dtype.itemsize * math.prod((*spans, *self.shape[len(self.take) :]))


@dataclass(frozen=True, slots=True)
class Source:
    """One wanted tensor: together its pieces fill it, each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def stored_bytes(sources: Mapping[str, Source]) -> int:
    """Of all pieces, each counted once however many tensors it is in."""
    return sum({id(piece): piece.nbytes for source in sources.values() for piece in source.pieces}.values())


def first_place(pieces: Iterable[Piece]) -> tuple[str, int]:
    """Where in the files these pieces begin."""
    extents = (piece.place for piece in pieces if isinstance(piece.place, Extent))
    return min(((str(extent.path), extent.offset) for extent in extents), default=("", 0))


@dataclass(frozen=True)
class Weights:
    """A checkpoint: its tensors by the names that it gives them."""

    origin: str
    """What errors call it: a folder or a file."""
    sources: Mapping[str, Source]
    quantization: Mapping[str, Any] | None = None
    """The quantization_config that lies beside it, {} if the config there has none; None: there is no config."""
