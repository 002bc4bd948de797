"""Tensors written as a folder of quantized safetensors, file after file; finished files outlive a killed run."""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.dtypes import short
from outpace.loading.out_folder import Kind, check_apart, check_out, check_space, out_folder
from outpace.loading.safetensors_file import DTYPES
from outpace.loading.safetensors_header import read_header
from outpace.loading.safetensors_write import SafetensorsWriter
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import Source
from outpace.loading.write_shards import Progress, Written, blocks, place_of
from outpace.log import chosen, logger
from outpace.quant.compressed import METHOD, bits, form, stored
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.scheme import Scheme

FILE_BYTES = 2_000_000_000
"""Of a file, about: what is lost when a run is killed."""
BLOCK_BYTES = 16 * 2**20
"""Of a weight that are quantized at a time; several times that is in memory."""
WHOLE = "model.safetensors"
RECORD = "outpace-unfinished.json"
ROWS = 8  # zero points of so many rows share an int32
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _is_quantized(folder: Path) -> bool:
    try:
        found = json.loads((folder / "config.json").read_text())
        return bool(found["quantization_config"]["quant_method"] == METHOD)
    except (OSError, ValueError, LookupError, TypeError):
        return False


QUANTIZED = Kind("quantized weights", f"a config.json that says {METHOD}", _is_quantized)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of a checkpoint, and what becomes of it."""

    name: str
    source: Source
    dtype: torch.dtype
    """What it is written in, if it is not quantized."""
    scheme: Scheme | None = None

    @property
    def specs(self) -> Specs:
        """What is written of it, by name."""
        if self.scheme is None:
            return {self.name: (self.dtype, self.source.shape)}
        rows, columns = self.source.shape
        prefix = self.name.removesuffix("weight")
        return {prefix + end: spec for end, spec in form((rows, columns), self.scheme).items()}

    @property
    def nbytes(self) -> int:
        """Of what is written."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.specs.values())


@dataclass(frozen=True, slots=True)
class WrittenQuantized(Written):
    """What was written, and how far it is from what was there."""

    before: int = 0
    """Bytes of the files that were read."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Of each quantized weight: the norm of what rounding changed, as a share of the norm of the weight."""
    taken_up: tuple[str, ...] = ()
    """Files that an earlier run had finished."""

    @property
    def worst(self) -> list[tuple[str, float]]:
        """The five weights with the largest errors."""
        return sorted(self.errors.items(), key=lambda item: -item[1])[:5]


def write_quantized(
    items: Collection[Item],
    out: Path,
    *,
    beside: Callable[[Path], None],
    unchanged: Unchanged,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> WrittenQuantized:
    """Write all items into a new folder `out`, which appears whole or not at all.

    What an earlier run with the same items left is gone on with. unchanged: the files that are read, as they were at
    the beginning.
    """
    begin = time.perf_counter()
    out = check_out(out, QUANTIZED, force=force)
    check_apart({item.name: item.source for item in items}, out)
    files = files_of(sorted(items, key=lambda item: place_of(item.source)))
    record = _Record(files, unchanged)
    total = sum(item.nbytes for item in items)
    with out_folder(out, QUANTIZED, force=force, usable=record.usable) as folder, _said(record, folder):
        done = record.take_up(folder)
        taken = tuple(done)
        check_space(out, total - sum(_size(files[name]) for name in taken))
        _write_files(folder, files, record, done, lambda count: progress(count, total))
        _check(unchanged, record, folder)
        write_index(folder, files)
        beside(folder)
        sizes = {name: (folder / name).stat().st_size for name in files}
        record.remove(folder)
    errors = {name: error for found in done.values() for name, error in found.items()}
    before = sum(size for size, _ in unchanged.seen.values())
    return WrittenQuantized(out, sizes, time.perf_counter() - begin, before, errors, taken)


def files_of(items: Sequence[Item]) -> dict[str, list[Item]]:
    """The items of each file, in the order in which they are read."""
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _size(items: Sequence[Item]) -> int:
    return sum(item.nbytes for item in items)


def specs_of(items: Sequence[Item]) -> Specs:
    """What is written of items, by name."""
    return {name: spec for item in items for name, spec in item.specs.items()}


def write_index(folder: Path, files: Mapping[str, list[Item]]) -> None:
    """Say which file has which tensor, where there are several."""
    if len(files) > 1:
        places = {name: file for file, items in files.items() for name in specs_of(items)}
        total = sum(_size(items) for items in files.values())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / f"{WHOLE}.index.json").write_text(json.dumps(content, indent=2) + "\n")


Done = dict[str, dict[str, float]]
"""Finished files, each with the errors of its weights."""


class _Record:
    """What an unfinished folder says of itself: of which source and plan it is, and which files are finished."""

    def __init__(self, files: Mapping[str, list[Item]], unchanged: Unchanged) -> None:
        self._files = files
        plan = [[file, [_described(item) for item in items]] for file, items in files.items()]
        self._about = {
            "source": {str(path): list(seen) for path, seen in sorted(unchanged.seen.items())},
            "schemes": sorted({str(item.scheme) for items in files.values() for item in items if item.scheme}),
            "plan": hashlib.sha256(json.dumps(plan).encode()).hexdigest(),
        }

    def usable(self, folder: Path) -> bool:
        """Whether files are finished there that this run would write the same."""
        return bool(self._finished(folder))

    def take_up(self, folder: Path) -> Done:
        """The finished files; everything else is removed."""
        finished = self._finished(folder)
        for path in folder.iterdir():
            if path.name not in (*finished, RECORD):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if finished:
            chosen("files of an earlier run", f"{len(finished)} of {len(self._files)}", "same source, same schemes")
        return {name: dict(found["errors"]) for name, found in finished.items()}

    def add(self, folder: Path, file: str, errors: Mapping[str, float]) -> None:
        """Note that a file is finished, once it is on the disk."""
        with (folder / file).open("rb") as written:
            os.fsync(written.fileno())
        seen = (folder / file).stat()
        entry = {"size": seen.st_size, "time": seen.st_mtime_ns, "errors": dict(errors)}
        content = {"about": self._about, "files": self._finished(folder) | {file: entry}}
        new = folder / f"{RECORD}.new"
        with new.open("w") as text:
            json.dump(content, text)
            text.flush()
            os.fsync(text.fileno())
        new.replace(folder / RECORD)

    def remove(self, folder: Path) -> None:
        """Nothing can be gone on with: it is complete, or of no use."""
        (folder / RECORD).unlink(missing_ok=True)

    def _finished(self, folder: Path) -> dict[str, Any]:
        try:
            content = json.loads((folder / RECORD).read_text())
            if content["about"] != self._about:
                return {}
            return {name: found for name, found in content["files"].items() if self._whole(folder / name, found)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # cut off, or of another release
            return {}

    def _whole(self, path: Path, found: Mapping[str, Any]) -> bool:
        """Whether a file is as it was when it was finished."""
        if path.name not in self._files or not path.is_file():
            return False
        seen = path.stat()
        try:
            entries = read_header(path).entries
        except ModelError:
            return False
        held = {name: (DTYPES.get(entry.dtype), tuple(entry.shape)) for name, entry in entries.items()}
        return (seen.st_size, seen.st_mtime_ns) == (found["size"], found["time"]) and held == specs_of(
            self._files[path.name]
        )


@contextmanager
def _said(record: _Record, folder: Path) -> Iterator[None]:
    """Say what is left of a run that ends early."""
    try:
        yield
    except BaseException:
        if record.usable(folder):
            logger.warning("finished files stay in %s: the same command goes on with them", folder)
        raise


def _check(unchanged: Unchanged, record: _Record, folder: Path) -> None:
    """Files of a source that changed are of no use to a later run."""
    try:
        unchanged.check()
    except ModelError:
        record.remove(folder)
        raise


def _described(item: Item) -> list[object]:
    return [item.name, list(item.source.shape), short(item.source.dtype), short(item.dtype), repr(item.scheme)]


def _write_files(
    folder: Path, files: Mapping[str, list[Item]], record: _Record, done: Done, progress: Callable[[int], None]
) -> None:
    """Write what is not done yet, and note each file."""
    count = sum(_size(files[name]) for name in done)
    progress(count)
    for file, items in files.items():
        if file in done:
            continue
        errors: dict[str, float] = {}
        with SafetensorsWriter(folder / file, specs_of(items), {}) as writer:
            for item in items:
                for nbytes in write_item(writer, item, errors):
                    count += nbytes
                    progress(count)
        record.add(folder, file, errors)
        done[file] = errors


def write_item(writer: SafetensorsWriter, item: Item, errors: dict[str, float]) -> Iterator[int]:
    """Write an item block by block, and yield the bytes of each."""
    if item.scheme is None:
        row = math.prod(item.source.shape[1:])
        for first, block in blocks(item.source):
            yield writer.write(item.name, block.to(item.dtype), first * row)
        return
    prefix, specs = item.name.removesuffix("weight"), item.specs
    if (shape := f"{prefix}weight_shape") in specs:
        yield writer.write(shape, torch.tensor(item.source.shape))
    lost = whole = 0.0
    for first, block in blocks(item.source, BLOCK_BYTES, ROWS):
        made = quantized(block, item.scheme)
        change, norm = change_of(block, made, item.scheme)
        lost, whole = lost + change, whole + norm
        for end, tensor in stored(made, item.scheme).items():
            width = specs[prefix + end][1][1]
            together = 32 // bits(item.scheme) if end == "weight_zero_point" else 1
            yield writer.write(prefix + end, tensor, first // together * width)
    if not math.isfinite(lost + whole):
        raise ModelError(f"model: {item.name} holds NaN or infinity, which cannot be quantized; use --exclude for it")
    errors[item.name] = math.sqrt(lost / whole) if whole else 0.0


def change_of(block: Tensor, made: Mapping[str, Tensor], scheme: Scheme) -> tuple[float, float]:
    """The squared norms of what rounding changed, and of what it was."""
    rows, columns = block.shape
    exact = block.float()
    found = as_packed(made, scheme, (rows, columns)).dequantized(torch.float32)
    return float((found - exact).square_().sum(dtype=torch.float64)), float(exact.square().sum(dtype=torch.float64))
