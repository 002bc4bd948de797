"""A checkpoint written as one file for each rank of tensor parallelism, in one process that never holds the model."""

import json
import math
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import InputError, OutpaceError
from outpace.loading.dtypes import short
from outpace.loading.layout import DESCRIPTOR, SAVE_ID
from outpace.loading.new_folder import new_folder, partial_prefix
from outpace.loading.read_source import read
from outpace.loading.regions import cut
from outpace.loading.safetensors_write import SafetensorsWriter
from outpace.loading.unchanged import Unchanged, unreadable
from outpace.loading.weights import Extent, Piece, Source
from outpace.log import size_text
from outpace.parallel.spans import Split

WHOLE = "non_tp.safetensors"
_NAMED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # those that a descriptor can name
BLOCK_BYTES = 64 * 2**20
"""Bytes that are in memory at a time, where a tensor can be read in parts."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are written and those that will be."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and how long it took."""

    folder: Path
    files: Mapping[str, int]
    """The bytes of each file with weights."""
    seconds: float

    @property
    def nbytes(self) -> int:
        """Of all these files."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class _Part:
    """What one file holds of a tensor."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int = 0
    spans: tuple[tuple[int, int], ...] | None = None
    """None: all of it."""


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
    """Write every tensor, cut as the splits say, into a new folder `out`: it appears whole or not at all.

    dtype: what floating tensors become, except those in `keep`, which become float32. beside: writes the other files
    of the folder. force: replace a folder of shards. field: the option that named `out`, for errors. unchanged: files
    that are read, as they were at the beginning.
    """
    begin = time.perf_counter()
    out = check_out(out, force=force, field=field)
    unchanged = Unchanged.of(_files_of(sources)) | (unchanged or Unchanged({}))
    _check_apart(sources, out, field)
    parts = {
        name: _parts(source, splits[name], _dtype_of(name, source, dtype, keep)) for name, source in sources.items()
    }
    files = [WHOLE, *(f"tp_{rank:02}.safetensors" for rank in range(ranks))]
    total = sum(_nbytes(part) for held in parts.values() for part in held)
    _check_space(out, total, field)
    save_id = secrets.token_hex(16)
    try:
        with new_folder(out, _holds_shards if force else lambda folder: False) as folder:
            _write_weights(folder, files, sources, parts, save_id, lambda done: progress(done, total))
            content = _descriptor(files, ranks, parts) | {SAVE_ID: save_id}
            (folder / DESCRIPTOR).write_text(json.dumps(content, indent=1) + "\n")
            beside(folder)
            sizes = {file: (folder / file).stat().st_size for file in files}
            unchanged.check()
    except FileExistsError as error:
        check_out(out, force=force, field=field)
        raise InputError(f"{field}: {out} was changed while shards for it were written; try again") from error
    except OSError as error:
        if error.filename is not None and not _is_written(Path(os.fsdecode(error.filename)), out):
            raise unreadable(os.fsdecode(error.filename), error) from error
        raise OutpaceError(
            f"{field}: cannot write {out} ({error.strerror or error}); check the disk and its rights"
        ) from error
    return Written(out, sizes, time.perf_counter() - begin)


def check_out(out: Path, *, force: bool, field: str = "out") -> Path:
    """Where the folder will be; refused where something is in the way that must not be replaced."""
    out = out.expanduser().resolve()
    if not out.parent.is_dir():
        raise InputError(f"{field}: there is no folder {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK):
        raise InputError(f"{field}: {out.parent} cannot be written to; choose another folder")
    if out.exists() and not out.is_dir():
        raise InputError(f"{field}: {out} is a file; give the name of a folder")
    if out.is_dir() and any(out.iterdir()):
        if not _holds_shards(out):
            raise InputError(f"{field}: {out} is not empty and holds no shards ({DESCRIPTOR}), so it is never replaced")
        if not force:
            raise InputError(f"{field}: {out} holds shards already; give --force to replace them, or another folder")
    return out


def _is_written(path: Path, out: Path) -> bool:
    """Whether a path is part of what is written: the folder, its hidden name, or the folder that it is in."""
    return path in (out, out.parent) or any(part.name.startswith(partial_prefix(out)) for part in (path, *path.parents))


def _holds_shards(folder: Path) -> bool:
    return (folder / DESCRIPTOR).is_file()


def _files_of(sources: Mapping[str, Source]) -> set[Path]:
    places = (piece.place for source in sources.values() for piece in source.pieces)
    return {place.path for place in places if isinstance(place, Extent)}


def _check_apart(sources: Mapping[str, Source], out: Path, field: str) -> None:
    """Files that are read, now or later, must not be replaced."""
    if any(path.resolve().is_relative_to(out) for path in _files_of(sources)):
        raise InputError(f"{field}: {out} holds the model itself; give another folder")


def _check_space(out: Path, needed: int, field: str) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OutpaceError(
            f"{field}: {size_text(needed)} will be written, and {out.parent} has room for {size_text(free)}; "
            "free some, or choose another disk"
        )


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
        for name in sorted(sources, key=lambda name: _place(sources[name])):
            for nbytes in _write_tensor(writers, name, sources[name], parts[name]):
                done += nbytes
                progress(done)


def _write_tensor(
    writers: Mapping[str, SafetensorsWriter], name: str, source: Source, parts: list[_Part]
) -> Iterator[int]:
    """Write a tensor block by block, and yield the bytes of each; none is held when the next tensor is read."""
    for first, block in _blocks(source):
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


def _place(source: Source) -> tuple[str, int]:
    """Where a source is first read: tensors are read in the order of their files."""
    place = source.pieces[0].place if source.pieces else None
    return (str(place.path), place.offset) if isinstance(place, Extent) else ("", 0)


def _blocks(source: Source) -> Iterator[tuple[int, Tensor]]:
    """A tensor in blocks of rows, each with the number of its first row; it is read in them too where that is cheap."""
    rows = source.shape[0] if source.shape else 1
    size = max(1, source.dtype.itemsize * math.prod(source.shape[1:]))
    step = max(1, BLOCK_BYTES // size)
    in_parts = all(isinstance(piece.place, Extent) and piece.swap is None for piece in source.pieces)
    whole = None if in_parts and source.shape else _whole(source)
    for first in range(0, rows, step):
        stop = min(rows, first + step)
        if whole is None:
            yield first, read(cut(source, 0, first, stop))
        else:
            yield first, whole[first:stop] if source.shape else whole.view(1)


def _whole(source: Source) -> Tensor:
    """All of a tensor; one that is made as it is wanted, or that a module holds, is not copied."""
    match source.pieces:
        case (Piece(place=place, take=(), swap=None, into=()),) if not isinstance(place, Extent):
            return place()
    return read(source)


def _write(writer: SafetensorsWriter, name: str, part: _Part, first: int, block: Tensor) -> int:
    """Write what a part has of a block of rows; returns the bytes."""
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
