"""Describes a checkpoint without reading it: tensors by name, each made of pieces of files."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Region = tuple[slice | int, ...]
"""Part of a tensor, as in `tensor[region]`; (): the whole tensor. Slices have step 1."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file, row after row, little-endian."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a stored tensor, and the region of a wanted tensor that it fills.

    wanted[into] = stored[take], or its transpose(*swap).
    """

    place: Extent | Callable[[], Tensor]
    """Its bytes in a file, or a function that computes it on the host: memory-mapped, dequantized or converted."""
    shape: tuple[int, ...]
    """The shape of the stored tensor."""
    dtype: torch.dtype
    take: Region = ()
    swap: tuple[int, int] | None = None
    into: Region = ()

    @property
    def nbytes(self) -> int:
        parts = zip(self.take, self.shape, strict=False)
        spans = (len(range(size)[part]) if isinstance(part, slice) else 1 for part, size in parts)
        return self.dtype.itemsize * math.prod((*spans, *self.shape[len(self.take) :]))


@dataclass(frozen=True, slots=True)
class Source:
    """One wanted tensor; its pieces fill each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def stored_bytes(sources: Mapping[str, Source]) -> int:
    """Bytes of all pieces; a piece in several tensors counts once."""
    return sum({id(piece): piece.nbytes for source in sources.values() for piece in source.pieces}.values())


def first_place(pieces: Iterable[Piece]) -> tuple[str, int]:
    """The first place of these pieces in the files."""
    extents = (piece.place for piece in pieces if isinstance(piece.place, Extent))
    return min(((str(extent.path), extent.offset) for extent in extents), default=("", 0))


@dataclass(frozen=True)
class Weights:
    """A checkpoint: its tensors by their stored names."""

    origin: str
    """Its folder or file, for errors."""
    sources: Mapping[str, Source]
    quantization: Mapping[str, Any] | None = None
    """The quantization_config of its config.json; {}: the config has none; None: there is no config."""
