"""Reads unit files: threads read blocks with O_DIRECT directly into the caller's memory and verify checksums."""

import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

import torch
from torch import Tensor

from outpace.errors import ConfigError, InputError, OffloadError, StateError
from outpace.log import chosen, logger
from outpace.offload.store_direct import fill, go_direct
from outpace.offload.store_layout import ALIGN, PIECE, Bytes, Layout, Sums, checksums, padded
from outpace.offload.store_memory import aligned

_MOST_THREADS = 256
_REMEDY = "check the disk; the next start writes the file again"


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read: `threads` reads in flight, of `block` bytes each."""

    threads: int = 8
    block: int = 8 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= _MOST_THREADS:
            raise ConfigError(f"threads: {self.threads} is not a number from 1 to {_MOST_THREADS}")
        if self.block < ALIGN or self.block % ALIGN:
            raise ConfigError(f"block: {self.block} is not a multiple of {ALIGN} bytes")

    @classmethod
    def of_aio(cls, thread_count: int | None, block_size: int | None, queue_depth: int | None) -> Self:
        """From DeepSpeed's options; None: our default. A thread has one read in flight, so `queue_depth` limits
        threads."""
        threads = cls.threads if thread_count is None else thread_count
        threads = threads if queue_depth is None else min(threads, queue_depth)
        return cls(threads=threads, block=cls.block if block_size is None else block_size)


_DEFAULT = ReadOptions()


class Reading:
    """A unit that is being read into memory; once done or failed, nothing is written there any more."""

    def __init__(self, what: str, blocks: int) -> None:
        self.what = what
        self._left = blocks
        self._lock = threading.RLock()  # reentrant, like the lock of _Readers
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if not blocks:
            self._ended.set()

    def done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the unit is in memory and verified; OffloadError if it is not."""
        self._ended.wait()
        if self._error is not None:
            raise OffloadError(f"{self.what}: {self._error}") from self._error

    @property
    def _failed(self) -> bool:
        return self._error is not None

    def _end_block(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._ended.set()


@dataclass(frozen=True)
class _Block:
    """Bytes to read from `offset` on, with their checksums."""

    reading: Reading
    into: Bytes
    offset: int
    sums: Sums

    def read(self, number: int, most: int, direct: bool) -> bool | None:
        """Read the block; returns whether its checksums are right, or None if they were not checked."""
        error: BaseException | None = None
        sound: bool | None = None
        try:
            if not self.reading._failed:
                self._read(number, most, direct)
                sound = True
        except OSError as raised:
            error = OSError(raised.errno, f"{raised.strerror}; {_REMEDY}")
        except OffloadError as raised:
            error, sound = raised, False
        except Exception as raised:
            error = raised
        self.reading._end_block(error)
        return sound

    def _read(self, number: int, most: int, direct: bool) -> None:
        there = fill(number, self.into, self.offset, most, direct)
        if there < len(self.into):
            raise OffloadError(f"the file ends {len(self.into) - there} bytes too early: it was truncated; {_REMEDY}")
        wrong = (checksums(self.into) != self.sums).nonzero()[0]
        if len(wrong):
            first = self.offset + int(wrong[0]) * PIECE
            raise OffloadError(f"wrong checksum of the bytes from {first} on: they were altered; {_REMEDY}")


class _Readers:
    """Threads that read blocks in the requested order from a file, which they close.

    They hold no reference to the UnitFile, so that its garbage collection ends them.
    """

    def __init__(self, number: int, options: ReadOptions, direct: bool, name: str) -> None:
        self._number, self._options, self._direct, self._name = number, options, direct, name
        self._blocks: SimpleQueue[_Block | None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: garbage collection may call close while it is held
        self._threads: list[threading.Thread] = []
        self._live = 0
        self._damaged: set[int] = set()  # offsets of blocks whose last read found wrong checksums
        self._closed = False
        self._process = os.getpid()

    def put(self, blocks: Sequence[_Block]) -> None:
        if os.getpid() != self._process:
            raise StateError(f"{self._name} was opened by another process, and a fork has no threads; open it again")
        with self._lock:
            if self._closed:
                raise StateError(
                    f"{self._name} is closed: the engine that had its layers there has ended; make a new one"
                )
            self._start_threads()
            for block in blocks:
                self._blocks.put(block)

    def _start_threads(self) -> None:
        while len(self._threads) < self._options.threads:
            name = f"outpace-read-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads is reached: continue with fewer
                if not self._threads:
                    raise OffloadError(f"{self._name} cannot be read: {error}") from error
                return
            self._threads.append(thread)
            self._live += 1

    def close(self) -> None:
        """Cancel blocks that have not started, and wait for the others."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._give_up()
                for _ in self._threads:
                    self._blocks.put(None)
                self._close_if_last()
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection in one of them called this
                thread.join()

    def _give_up(self) -> None:
        while True:
            try:
                block = self._blocks.get_nowait()
            except Empty:
                return
            if block is not None:
                block.reading._end_block(OffloadError("the file was closed before it was read"))

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            sound = block.read(self._number, self._options.block, self._direct)
            if sound is not None:
                (self._damaged.discard if sound else self._damaged.add)(block.offset)
            del block  # do not keep its memory while waiting
        with self._lock:
            self._live -= 1
            self._close_if_last()

    def _close_if_last(self) -> None:
        if self._closed and not self._live:
            if self._damaged:
                _remove(self._number, Path(self._name))
            os.close(self._number)


def _remove(number: int, path: Path) -> None:
    """Remove a damaged file, if it still has this name; the next start writes it again."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(number), path.stat()):
            path.unlink()
            logger.warning("%s was damaged and is removed: the next start writes it again", path)


class UnitFile:
    """A complete file, open for reading from any thread; closed by `close` or by garbage collection."""

    def __init__(self, opened: "_Opened", path: Path, layout: Layout, options: ReadOptions) -> None:
        """Use `find`, or `UnitWriter.finish`."""
        self.path = path
        self.note = opened.note
        """The writer's description of the units."""
        self.direct = opened.direct
        """Whether it is read with O_DIRECT."""
        self._layout, self._sums = layout, opened.sums
        self._block = max(PIECE, options.block // PIECE * PIECE)
        readers = _Readers(opened.number, options, opened.direct, str(path))
        self._put = readers.put
        self._close = weakref.finalize(self, readers.close)

    @classmethod
    def find(
        cls, folder: str | os.PathLike[str], key: str, sizes: Sequence[int], *, options: ReadOptions = _DEFAULT
    ) -> Self | None:
        """The complete file with this key and these sizes; None: there is none."""
        layout = Layout(key, sizes)
        path = Path(folder) / layout.name
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OffloadError(f"{path} cannot be read: {error.strerror}") from error
        return cls.of(number, path, layout, options)

    @classmethod
    def of(cls, number: int, path: Path, layout: Layout, options: ReadOptions) -> Self | None:
        """The file that is open as `number`; None, and closed, if it is not complete."""
        try:
            opened = _look_into(number, layout)
            if opened is not None:
                if not opened.direct:
                    chosen("offload reads", "through the page cache", f"{path.parent} does not support O_DIRECT")
                return cls(opened, path, layout, options)
        except OSError as error:
            os.close(number)
            raise OffloadError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
        except BaseException:
            os.close(number)
            raise
        os.close(number)
        logger.info("%s is damaged, or holds another form of the model: not used", path)
        return None

    def close(self) -> None:
        """End the threads: wait for running blocks, and fail readings whose blocks have not started."""
        self._close()

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._layout.sizes

    def read(self, index: int, into: Tensor) -> Reading:
        """Start to read a unit into memory from `aligned`, which must not be used until the reading is done."""
        if not 0 <= index < len(self.sizes):
            raise InputError(f"index: {self.path} has no unit {index}, only {len(self.sizes)}")
        length = padded(self.sizes[index])
        data = _bytes_of(into, length)
        step = self._block
        reading = Reading(f"{self.path}, unit {index}", -(-length // step))
        offset, first = self._layout.offsets[index], self._layout.pieces[index]
        self._put(
            [
                _Block(reading, part, offset + start, self._sums[piece : piece + -(-len(part) // PIECE)])
                for start in range(0, length, step)
                for part, piece in ((data[start : start + step], first + start // PIECE),)
            ]
        )
        return reading


def stored_size(folder: Path, key: str) -> int:
    """Bytes of the file with this key, whatever its sizes; 0: there is none."""
    path = folder / Layout(key, ()).name
    return path.stat().st_size if path.is_file() else 0


@dataclass(frozen=True)
class _Opened:
    """An open, complete file."""

    number: int
    direct: bool
    sums: Sums
    note: str


def _look_into(number: int, layout: Layout) -> _Opened | None:
    """Read header and note; None if they or the file's length are wrong."""
    direct = go_direct(number)
    found = layout.parse(_start_of(number, 0, layout.header_bytes, direct))
    if found is None:
        return None
    sums, length, digest = found
    if os.fstat(number).st_size != layout.total + padded(length):
        return None
    note = _start_of(number, layout.total, length, direct)
    return _Opened(number, direct, sums, note.decode()) if hashlib.sha256(note).digest() == digest else None


def _start_of(number: int, offset: int, length: int, direct: bool) -> bytes:
    """`length` bytes from `offset` on; fewer at the end of the file."""
    data = aligned(length).numpy()
    there = fill(number, data, offset, max(ALIGN, len(data)), direct)
    return data[: min(there, length)].tobytes()


def _bytes_of(into: Tensor, length: int) -> Bytes:
    if into.dtype != torch.uint8 or into.device.type != "cpu" or not into.is_contiguous() or into.data_ptr() % ALIGN:
        raise InputError(f"into: bytes of host memory at a multiple of {ALIGN} are needed, as store.aligned gives them")
    if into.numel() < length:
        raise InputError(f"into: {into.numel()} bytes are too few for the unit's {length}")
    return into.view(-1)[:length].numpy()
