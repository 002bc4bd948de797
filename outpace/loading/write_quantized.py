"""Writes a folder of quantized safetensors file by file; a later run continues after the finished files."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.loading.dtypes import short
from outpace.loading.out_folder import Kind, check_apart, check_out, check_space, out_folder
from outpace.loading.safetensors_file import DTYPES, SafetensorsWriter
from outpace.loading.safetensors_header import read_header
from outpace.loading.unchanged import Unchanged
from outpace.loading.weights import first_place
from outpace.loading.write_calibrated import Run, write_calibrated
from outpace.loading.write_items import Item, specs_of, write_item
from outpace.loading.write_shards import Progress, Written
from outpace.log import chosen, logger
from outpace.quant.compressed import METHOD

FILE_BYTES = 2_000_000_000
"""Approximate bytes of a file; at most this much work is lost if a run is killed."""
WHOLE = "model.safetensors"
RECORD = "outpace-unfinished.json"


def _is_quantized(folder: Path) -> bool:
    try:
        found = json.loads((folder / "config.json").read_text())
        return bool(found["quantization_config"]["quant_method"] == METHOD)
    except (OSError, ValueError, LookupError, TypeError):
        return False


QUANTIZED = Kind("quantized weights", f"a config.json that says {METHOD}", _is_quantized)


@dataclass(frozen=True, slots=True)
class WrittenQuantized(Written):
    """What was written, with the rounding errors."""

    before: int = 0
    """Bytes of the original files."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Quantized weight -> norm of its rounding error relative to its norm."""
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
    run: Run | None,
    force: bool,
    progress: Progress,
) -> WrittenQuantized:
    """Write all items into a new folder `out`, which appears atomically.

    Continues an interrupted run with the same items. unchanged: the state of the files that are read. run: quantizes
    weights by calibration; such a run cannot be continued.
    """
    begin = time.perf_counter()
    out = check_out(out, QUANTIZED, force=force)
    check_apart({item.name: item.source for item in items}, out)
    files = _files_of(sorted(items, key=lambda item: first_place(item.source.pieces)))
    record = _Record(files, unchanged)
    total = sum(item.nbytes for item in items)
    usable = record.usable if run is None else lambda folder: False
    with out_folder(out, QUANTIZED, force=force, usable=usable) as folder, _log_usable(record, folder):
        done = record.take_up(folder)
        taken = tuple(done)
        check_space(out, total - sum(_size(files[name]) for name in taken))
        if run is None:
            _write_files(folder, files, record, done, lambda count: progress(count, total))
        else:
            done[""] = write_calibrated(folder, files, run, lambda count: progress(count, total))
        _check(unchanged, record, folder)
        _write_index(folder, files)
        beside(folder)
        sizes = {name: (folder / name).stat().st_size for name in files}
        record.remove(folder)
    errors = {name: error for found in done.values() for name, error in found.items()}
    before = sum(size for size, _ in unchanged.seen.values())
    return WrittenQuantized(out, sizes, time.perf_counter() - begin, before, errors, taken)


def _files_of(items: Sequence[Item]) -> dict[str, list[Item]]:
    """The items of each file, in reading order."""
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


def _write_index(folder: Path, files: Mapping[str, list[Item]]) -> None:
    """Write the index of tensors, if there are several files."""
    if len(files) > 1:
        places = {name: file for file, items in files.items() for name in specs_of(items)}
        total = sum(_size(items) for items in files.values())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / f"{WHOLE}.index.json").write_text(json.dumps(content, indent=2) + "\n")


Done = dict[str, dict[str, float]]
"""Finished file -> errors of its weights."""


class _Record:
    """The record in an unfinished folder: its source, its plan, and which files are finished."""

    def __init__(self, files: Mapping[str, list[Item]], unchanged: Unchanged) -> None:
        self._files = files
        plan = [[file, [_described(item) for item in items]] for file, items in files.items()]
        self._about = {
            "source": {str(path): list(seen) for path, seen in sorted(unchanged.seen.items())},
            "schemes": sorted({str(item.scheme) for items in files.values() for item in items if item.scheme}),
            "plan": hashlib.sha256(json.dumps(plan).encode()).hexdigest(),
        }

    def usable(self, folder: Path) -> bool:
        """Whether the folder has finished files that this run would write identically."""
        return bool(self._finished(folder))

    def take_up(self, folder: Path) -> Done:
        """Return the finished files and remove everything else."""
        finished = self._finished(folder)
        for path in folder.iterdir():
            if path.name not in (*finished, RECORD):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if finished:
            chosen("files of an earlier run", f"{len(finished)} of {len(self._files)}", "same source, same schemes")
        return {name: dict(found["errors"]) for name, found in finished.items()}

    def add(self, folder: Path, file: str, errors: Mapping[str, float]) -> None:
        """Record a file as finished, after flushing it to disk."""
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
        """Remove the record: the folder is complete or useless."""
        (folder / RECORD).unlink(missing_ok=True)

    def _finished(self, folder: Path) -> dict[str, Any]:
        try:
            content = json.loads((folder / RECORD).read_text())
            if content["about"] != self._about:
                return {}
            return {name: found for name, found in content["files"].items() if self._whole(folder / name, found)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # truncated, or from another release
            return {}

    def _whole(self, path: Path, found: Mapping[str, Any]) -> bool:
        """Whether a finished file is unchanged."""
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
def _log_usable(record: _Record, folder: Path) -> Iterator[None]:
    """Log after an error if a later run can continue."""
    try:
        yield
    except BaseException:
        if record.usable(folder):
            logger.warning("finished files stay in %s: the same command continues with them", folder)
        raise


def _check(unchanged: Unchanged, record: _Record, folder: Path) -> None:
    """Check the source files; if they changed, no later run can continue."""
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
    """Write the remaining files, and record each of them."""
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
