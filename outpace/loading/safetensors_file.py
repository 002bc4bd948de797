"""A safetensors file as `Weights`: every tensor is bytes of the file."""

from collections.abc import Mapping
from pathlib import Path

import torch

from outpace.loading.safetensors_header import Entry, Header, read_header
from outpace.loading.weights import Extent, Piece, Source

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}


def read_safetensors(path: Path) -> dict[str, Source]:
    """The tensors of a file by name."""
    return sources_of(path, read_header(path))


def sources_of(path: Path, header: Header) -> dict[str, Source]:
    """The tensors of a file whose header has been read."""
    return {name: _source(path, entry) for name, entry in header.entries.items()}


def _source(path: Path, entry: Entry) -> Source:
    dtype = DTYPES[entry.dtype]
    return Source(entry.shape, dtype, (Piece(Extent(path, entry.start), entry.shape, dtype),))
