"""Reads a safetensors file as sources, and writes one tensor by tensor."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from outpace.errors import NotSupported
from outpace.loading import safetensors_header
from outpace.loading.dtypes import short
from outpace.loading.safetensors_header import Header
from outpace.loading.weights import Extent, Piece, Source

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, (dtype, _) in safetensors_header.DTYPES.items()
}
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def sources_of(path: Path, header: Header) -> dict[str, Source]:
    """The tensors of a file whose header has been read."""
    return {
        name: Source(entry.shape, dtype, (Piece(Extent(path, entry.start), entry.shape, dtype),))
        for name, entry in header.entries.items()
        for dtype in (DTYPES[entry.dtype],)
    }


class SafetensorsWriter:
    """A file with its header written and space for its tensors, given as name -> (dtype, shape)."""

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
        self._places: dict[str, int] = {}
        end = 0
        # large elements first, for alignment
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            if dtype not in _NAMES:
                raise NotSupported(f"safetensors: {name} is {short(dtype)}, which such a file cannot store")
            self._places[name], start = end, end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._data = 8 + len(text)
        self.size = self._data + end
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.truncate(self._file, self.size)
            self._put(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, name: str, tensor: Tensor, skip: int = 0) -> int:
        """Write elements of a tensor after its first `skip` elements; returns the number of bytes."""
        content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        self._put(content, self._data + self._places[name] + skip * tensor.dtype.itemsize)
        return len(content)

    def _put(self, content: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(content), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], offset + done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
