"""Writes unit files under a locked temporary name, and renames them when they are complete."""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outpace.errors import InputError, OffloadError, StateError
from outpace.log import logger
from outpace.offload.store_direct import go_direct, write, writing
from outpace.offload.store_layout import ALIGN, PIECE, Bytes, Layout, checksums, padded
from outpace.offload.store_memory import aligned
from outpace.offload.store_read import ReadOptions, UnitFile

_SUFFIX = ".writing"
_BLOCK = 2 * PIECE
_DEFAULT = ReadOptions()


class UnitWriter:
    """`with UnitWriter(folder, key, sizes) as writer:`, `put` each unit, `finish`; without `finish` nothing remains.

    If another process writes the same file, this waits for it; then `found` is its file, and nothing is left to put.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        key: str,
        sizes: Sequence[int],
        *,
        temporary: bool = False,
        options: ReadOptions = _DEFAULT,
    ) -> None:
        """temporary: the file never has a name and disappears with the process."""
        if any(size < 0 for size in sizes):
            raise InputError("sizes: a unit cannot have less than 0 bytes")
        self.found: UnitFile | None = None
        self._layout = Layout(key, sizes)
        self._path = Path(folder) / self._layout.name
        self._temporary, self._options = temporary, options
        self._sums = np.zeros(self._layout.pieces[-1], dtype=np.uint64)
        self._missing = set(range(len(self._layout.sizes)))
        self._number: int | None = None

    def __enter__(self) -> Self:
        with writing(self._path, self._layout.total):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._number = self._nameless() if self._temporary else self._claim()
            try:
                self._start(self._number)
            except BaseException:
                self._drop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def put(self, index: int, data: Tensor) -> None:
        """Write a unit (bytes in host memory). Several threads may put different units."""
        number = self._open()
        size = self._checked(index, data)
        source = data.view(-1)[:size].numpy()
        spare = aligned(min(_BLOCK, padded(size))).numpy()
        with writing(self._path, self._layout.total):
            for start in range(0, size, _BLOCK):
                block = _whole_pages(source[start : start + _BLOCK], spare)
                first = self._layout.pieces[index] + start // PIECE
                sums = checksums(block)
                self._sums[first : first + len(sums)] = sums
                write(number, block, self._layout.offsets[index] + start)
        self._missing.discard(index)

    def finish(self, note: str = "") -> UnitFile:
        """Rename the complete file and open it. The note is stored in it."""
        if self.found is not None:
            return self.found
        number = self._open()
        if self._missing:
            raise StateError(f"finish: units {sorted(self._missing)[:8]} were not put; put each before")
        with writing(self._path, self._layout.total):
            write(number, _pages(note.encode()), self._layout.total)
            write(number, _pages(self._layout.header(self._sums, note.encode())), 0)
            os.fsync(number)
            if not self._temporary:
                self._partial.replace(self._path)
                _flush_folder(self._path.parent)
            file = self._opened(number)
        self._drop()
        if file is None:
            raise OffloadError(f"{self._path} was changed by another program while it was written; write it again")
        return file

    def _opened(self, number: int) -> UnitFile | None:
        if self._temporary:
            return UnitFile.of(os.dup(number), self._path, self._layout, self._options)
        return UnitFile.find(self._path.parent, self._layout.key, self._layout.sizes, options=self._options)

    @property
    def _partial(self) -> Path:
        return self._path.with_suffix(_SUFFIX)

    def _open(self) -> int:
        if self._number is None:
            raise StateError("the file is not open for writing: use `with`, check `found`, and put before finish")
        return self._number

    def _checked(self, index: int, data: Tensor) -> int:
        if not 0 <= index < len(self._layout.sizes):
            raise InputError(f"index: there is no unit {index}, only {len(self._layout.sizes)}")
        if index not in self._missing:
            raise StateError(f"put: unit {index} was put already")
        size = self._layout.sizes[index]
        if data.dtype != torch.uint8 or data.device.type != "cpu" or not data.is_contiguous():
            raise InputError("data: contiguous bytes in host memory are needed")
        if not size <= data.numel() <= padded(size):
            raise InputError(f"data: unit {index} has {size} bytes, not {data.numel()}")
        return size

    def _nameless(self) -> int:
        number, name = tempfile.mkstemp(suffix=_SUFFIX, dir=self._path.parent)
        Path(name).unlink(missing_ok=True)  # another writer's _tidy_up may have removed it already
        return number

    def _claim(self) -> int:
        """Open and lock the temporary file; waits while another process writes it."""
        while True:
            number = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                if not _locked(number):
                    logger.info("waiting for another process that writes %s", self._path)
                    fcntl.flock(number, fcntl.LOCK_EX)
                if _is_at(number, self._partial):
                    return number
            except BaseException:
                os.close(number)
                raise
            os.close(number)  # it was renamed or removed while we waited

    def _start(self, number: int) -> None:
        """Use the file if it exists by now; otherwise clean up, and allocate its disk space."""
        if not self._temporary:
            self.found = self._opened(number)
            if self.found is not None:
                self._drop()
                return
            _tidy_up(self._path.parent)
        os.ftruncate(number, 0)
        os.posix_fallocate(number, 0, self._layout.total)
        go_direct(number, to_write=True)

    def _drop(self) -> None:
        if self._number is None:
            return
        if not self._temporary and _is_at(self._number, self._partial):
            self._partial.unlink()
        os.close(self._number)
        self._number = None


def _whole_pages(part: Bytes, spare: Bytes) -> Bytes:
    """The bytes aligned and padded for O_DIRECT: unchanged if they are, else copied to `spare`."""
    length = padded(len(part))
    if length == len(part) and not part.ctypes.data % ALIGN:
        return part
    spare[: len(part)] = part
    spare[len(part) : length] = 0
    return spare[:length]


def _pages(content: bytes) -> Bytes:
    return _whole_pages(np.frombuffer(content, dtype=np.uint8), aligned(len(content)).numpy())


def _locked(number: int) -> bool:
    """Lock a file; False: another process holds the lock."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(number: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), path.stat())
    return False


def _tidy_up(folder: Path) -> None:
    """Remove temporary files of killed processes: those that are not locked."""
    for leftover in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            number = os.open(leftover, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _locked(number) and _is_at(number, leftover):
                    leftover.unlink()
            finally:
                os.close(number)


def _flush_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
