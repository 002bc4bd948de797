"""Writes one file for each tensor-parallel rank, in one process that never holds the whole model."""

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.loading.dtypes import short
from outpace.loading.layout import DESCRIPTOR, SAVE_ID
from outpace.loading.out_folder import Kind, check_apart, check_out, check_space, files_of, out_folder
from outpace.loading.read_source import read
from outpace.loading.regions import cut
from outpace.loading.safetensors_file import SafetensorsWriter
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import Extent, Piece, Source, first_place
from outpace.parallel.spans import Split

SHARDS = Kind("shards", DESCRIPTOR, lambda folder: (folder / DESCRIPTOR).is_file())
WHOLE = "non_tp.safetensors"
_NAMED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that a descriptor can name
BLOCK_BYTES = 64 * 2**20
"""Bytes in memory at a time, if a tensor can be read in parts."""

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the total."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and how long it took."""

    folder: Path
    files: Mapping[str, int]
    """File with weights -> its bytes."""
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a tensor in one file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int = 0
    spans: tuple[tuple[int, int], ...] | None = None
    """Ranges in `dim`; None: the whole tensor."""


def write_shards(
    sources: Mapping[str, Source],
    splits: Mapping[str, Split | None],
    out: Path,
    *,
    ranks: int,
    dtype: torch.dtype | None = None,
    keep: Collection[str] = (),
    beside: Callable[[Path], None] = lambda folder: None,
    force: bool = False,
    field: str = "out",
    unchanged: Unchanged | None = None,
    progress: Progress = lambda done, total: None,
) -> Written:
    """Write all tensors, divided by the splits, into a new folder `out`, which appears atomically.

    dtype: dtype of floating tensors, except those in `keep`, which become float32. beside: writes the other files of
    the folder. force: replace a folder of shards. field: the option that named `out`, for errors. unchanged: the state
    of the files that are read.
    """
    begin = time.perf_counter()
    out = check_out(out, SHARDS, force=force, field=field)
    unchanged = Unchanged.of(files_of(sources)) | (unchanged or Unchanged({}))
    check_apart(sources, out, field)
    parts = {
        name: _parts(source, splits[name], _dtype_of(name, source, dtype, keep)) for name, source in sources.items()
    }
    files = [WHOLE, *(f"tp_{rank:02}.safetensors" for rank in range(ranks))]
    total = sum(_nbytes(part) for held in parts.values() for part in held)
    check_space(out, total, field)
    save_id = secrets.token_hex(16)
    with out_folder(out, SHARDS, force=force, field=field) as folder:
        _write_weights(folder, files, sources, parts, save_id, lambda done: progress(done, total))
        content = _descriptor(files, ranks, parts) | {SAVE_ID: save_id}
        (folder / DESCRIPTOR).write_text(json.dumps(content, indent=1) + "\n")
        beside(folder)
        sizes = {file: (folder / file).stat().st_size for file in files}
        unchanged.check()
    return Written(out, sizes, time.perf_counter() - begin)


def _dtype_of(name: str, source: Source, dtype: torch.dtype | None, keep: Collection[str]) -> torch.dtype:
    if dtype is None or not source.dtype.is_floating_point:
        return source.dtype
    return torch.float32 if name in keep else dtype


def _parts(source: Source, split: Split | None, dtype: torch.dtype) -> list[_Part]:
    whole = _Part(WHOLE, dtype, source.shape)
    if split is None:
        return [whole]
    held = zip(split.spans, split.sizes(), strict=True)
    return [
        _Part(
            f"tp_{rank:02}.safetensors",
            dtype,
            (*source.shape[: split.dim], size, *source.shape[split.dim + 1 :]),
            split.dim,
            spans,
        )
        for rank, (spans, size) in enumerate(held)
    ]


def _nbytes(part: _Part) -> int:
    return math.prod(part.shape) * part.dtype.itemsize


def _write_weights(
    folder: Path,
    files: list[str],
    sources: Mapping[str, Source],
    parts: Mapping[str, list[_Part]],
    save_id: str,
    progress: Callable[[int], None],
) -> None:
    with ExitStack() as stack:
        writers = {file: stack.enter_context(_writer(folder, file, sources, parts, save_id)) for file in files}
        done = 0
        for name in sorted(sources, key=lambda name: first_place(sources[name].pieces)):
            for nbytes in _write_tensor(writers, name, sources[name], parts[name]):
                done += nbytes
                progress(done)


def _write_tensor(
    writers: Mapping[str, SafetensorsWriter], name: str, source: Source, parts: list[_Part]
) -> Iterator[int]:
    """Write a tensor block by block; yields the bytes of each block. No block is kept when the next tensor is read."""
    for first, block in blocks(source):
        yield sum(_write(writers[part.file], name, part, first, block) for part in parts)


def _writer(
    folder: Path, file: str, sources: Mapping[str, Source], parts: Mapping[str, list[_Part]], save_id: str
) -> SafetensorsWriter:
    held = {name: part for name, each in parts.items() for part in each if part.file == file}
    regions = {
        name: {"shape": sources[name].shape, "dim": part.dim, "ranges": part.spans}
        for name, part in held.items()
        if part.spans is not None
    }
    metadata = {SAVE_ID: save_id}
    if file != WHOLE:
        metadata["regions"] = json.dumps(regions, separators=(",", ":"))
    return SafetensorsWriter(folder / file, {name: (part.dtype, part.shape) for name, part in held.items()}, metadata)


def blocks(source: Source, nbytes: int | None = None, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, block of rows) of a tensor, which is read in blocks if that is cheap.

    multiple: the number of rows in each block except the last is a multiple of this.
    """
    rows = source.shape[0] if source.shape else 1
    size = max(1, source.dtype.itemsize * math.prod(source.shape[1:]))
    step = max(1, (nbytes or BLOCK_BYTES) // (size * multiple)) * multiple
    in_parts = all(isinstance(piece.place, Extent) and piece.swap is None for piece in source.pieces)
    whole = None if in_parts and source.shape else _whole(source)
    for first in range(0, rows, step):
        stop = min(rows, first + step)
        if whole is None:
            yield first, read(cut(source, 0, first, stop))
        else:
            yield first, whole[first:stop] if source.shape else whole.view(1)


def _whole(source: Source) -> Tensor:
    """The whole tensor; a tensor that is computed or held by a module is not copied."""
    match source.pieces:
        case (Piece(place=place, take=(), swap=None, into=()),) if not isinstance(place, Extent):
            return place()
    return read(source)


def _write(writer: SafetensorsWriter, name: str, part: _Part, first: int, block: Tensor) -> int:
    """Write the rows of a block that belong to a part; returns the bytes."""
    row = math.prod(part.shape[1:])
    if part.spans is None:
        return writer.write(name, block.to(part.dtype), first * row)
    if part.dim > 0:
        columns = [block.narrow(part.dim, start, stop - start) for start, stop in part.spans]
        return writer.write(name, torch.cat(columns, part.dim).to(part.dtype), first * row)
    done = held = 0
    for start, stop in part.spans:
        low, high = max(start, first), min(stop, first + len(block))
        if low < high:
            rows = block[low - first : high - first]
            done += writer.write(name, rows.to(part.dtype), (held + low - start) * row)
        held += stop - start
    return done


def _descriptor(files: list[str], ranks: int, parts: Mapping[str, list[_Part]]) -> dict[str, object]:
    nbytes: Counter[torch.dtype] = Counter()
    for part in (part for held in parts.values() for part in held if part.dtype in _NAMED_DTYPES):
        nbytes[part.dtype] += _nbytes(part)
    return {
        "type": "ds_model",
        "base_dir": "",
        "checkpoints": {"non_tp": files[:1], "tp": files[1:]},
        "version": 1.0,
        "parallelization": "tp",
        "tp_size": ranks,
        "dtype": short(nbytes.most_common(1)[0][0]) if nbytes else None,
    }
