"""One stream of bytes from files into weights: several threads read, into place or through page-locked memory."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.jobs import Job, Run, as_rows, flat
from outpace.loading.weights import Extent

CHUNK = 8 << 20  # bytes that are read at once
THREADS = 16
SLOTS = 2  # of page-locked memory for each thread: one is filled while the other is copied from
LOOK_EVERY = 0.05  # seconds between looks at how far the threads are

Advance = Callable[[int], None]
"""Told how many more bytes are in place."""
Read = Callable[[np.ndarray, int], None]
"""Reads bytes of a stored tensor, from an offset on, into an array."""


def stream(jobs: Sequence[Job], device: torch.device, advance: Advance = lambda count: None) -> None:
    """Do all jobs, in the order of the files. All places are on `device`."""
    total = sum(job.nbytes for job in jobs)
    threads = max(1, min(THREADS, len(os.sched_getaffinity(0)), total // CHUNK))
    with _Files() as files:
        work = _Work(_tasks(jobs, files))
        copy = torch.cuda.Stream(device) if device.type == "cuda" else None
        if copy is not None:
            copy.wait_stream(torch.cuda.current_stream(device))
        landings: list[_Landing] = [_Host() if copy is None else _Device(copy) for _ in range(threads)]
        try:
            work.run(landings, advance)
        finally:
            if copy is not None:  # after an error too: nobody may get memory that is still written to
                copy.synchronize()


class _Files:
    """Open files."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._open.values():
            os.close(number)

    def reader(self, extent: Extent) -> Read:
        """Reads from where a tensor begins."""
        if extent.path not in self._open:
            try:
                self._open[extent.path] = os.open(extent.path, os.O_RDONLY)
            except OSError as error:
                raise ModelError(f"model: cannot open {extent.path} ({error.strerror}); check it") from error
        number = self._open[extent.path]

        def read(into: np.ndarray, offset: int) -> None:
            done = 0
            while done < len(into):
                try:
                    count = os.preadv(number, [into.data[done:]], extent.offset + offset + done)
                except OSError as error:
                    raise ModelError(f"model: cannot read {extent.path} ({error.strerror}); check the disk") from error
                if count == 0:
                    raise ModelError(f"model: {extent.path} ends early: it became shorter while it was read; try again")
                done += count

        return read


class _Landing(Protocol):
    """How one thread gets bytes into place."""

    def begin(self) -> None:
        """Called first, by that thread."""

    def copy(self, place: Tensor, read: Read, offset: int) -> None:
        """Bytes as they are: `place` is some of the bytes of a weight."""

    def convert(self, job: Job, run: Run, read: Read) -> None:
        """Rows that are converted, or do not lie together."""


class _Host:
    """Into memory of the host."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """Nothing to do."""

    def copy(self, place: Tensor, read: Read, offset: int) -> None:
        read(place.numpy(), offset)

    def convert(self, job: Job, run: Run, read: Read) -> None:
        if len(self._scratch) < run.nbytes:
            self._scratch = torch.empty(max(run.nbytes, CHUNK), dtype=torch.uint8)
        data = self._scratch[: run.nbytes]
        read(data.numpy(), run.offset)
        job.write(run, as_rows(job, run, data))


class _Device:
    """Onto a GPU: through slots of page-locked memory, which are filled again once they are copied."""

    def __init__(self, copies: torch.cuda.Stream) -> None:
        self._copies = copies
        self._slots = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]
        self._turn = 0

    def begin(self) -> None:
        torch.cuda.set_stream(self._copies)  # and its device, for this thread: the first GPU stays as it is

    def copy(self, place: Tensor, read: Read, offset: int) -> None:
        slot = self._free(len(place))
        read(slot.numpy(), offset)
        place.copy_(slot, non_blocking=True)
        self._copied[self._turn].record(self._copies)

    def convert(self, job: Job, run: Run, read: Read) -> None:
        slot = self._free(run.nbytes)
        read(slot.numpy(), run.offset)
        job.write(run, as_rows(job, run, slot.to(self._copies.device, non_blocking=True)))
        self._copied[self._turn].record(self._copies)

    def _free(self, count: int) -> Tensor:
        """A slot that nobody copies from any more. Threads lock its pages themselves, while others read already."""
        self._turn = (self._turn + 1) % SLOTS
        self._copied[self._turn].synchronize()  # at once where nothing was copied yet
        if len(self._slots[self._turn]) < count:  # none yet, or a row of more than a chunk
            self._slots[self._turn] = torch.empty(max(count, CHUNK), dtype=torch.uint8, pin_memory=True)
        return self._slots[self._turn][:count]


Task = Callable[[_Landing], int]
"""A piece of work for one thread; returns the bytes that it put in place."""


def _tasks(jobs: Sequence[Job], files: _Files) -> Iterator[Task]:
    """In the order of the files; tensors that are made on the host come last, one at a time."""
    stored = [(job.piece.place, job) for job in jobs if isinstance(job.piece.place, Extent)]
    for extent, job in sorted(stored, key=lambda pair: (pair[0].path, pair[0].offset)):
        yield from _pieces(job, files.reader(extent))
    alone = threading.Lock()
    for job in jobs:
        if not isinstance(job.piece.place, Extent):
            yield _made(job, alone)


def _pieces(job: Job, read: Read) -> Iterator[Task]:
    if not job.direct:
        for run in job.runs(CHUNK):
            yield partial(_converted, job=job, run=run, read=read)
        return
    place = flat(job.place)
    first = next(job.runs(job.nbytes or 1), None)
    for start in range(0, len(place), CHUNK):
        part = place[start : start + CHUNK]
        offset = start + (0 if first is None else first.offset)
        yield partial(_copied, place=part, read=read, offset=offset)


def _copied(landing: _Landing, place: Tensor, read: Read, offset: int) -> int:
    landing.copy(place, read, offset)
    return len(place)


def _converted(landing: _Landing, job: Job, run: Run, read: Read) -> int:
    landing.convert(job, run, read)
    return run.nbytes


def _made(job: Job, alone: threading.Lock) -> Task:
    """A tensor that is made on the host: one at a time, so that there is never more than one."""

    def task(landing: _Landing) -> int:
        make: Any = job.piece.place
        with alone:
            tensor: Tensor = make()
            if tuple(tensor.shape) != job.piece.shape or tensor.dtype != job.piece.dtype:
                raise ModelError(f"model: a tensor of {tensor.dtype} {tuple(tensor.shape)} is not what its file said")
            data = flat(tensor.contiguous()).numpy()

            def read(into: np.ndarray, offset: int) -> None:
                into[:] = data[offset : offset + len(into)]

            return sum(each(landing) for each in _pieces(job, read))

    return task


class _Work:
    """Tasks that several threads share. The first error ends all of them."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._done = 0
        self._error: BaseException | None = None
        self._stopped = False

    def run(self, landings: Sequence[_Landing], advance: Advance) -> None:
        """Do all tasks; an error of any thread is raised here."""
        threads = [threading.Thread(target=self._thread, args=[each], name="outpace-load") for each in landings]
        told = 0
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(LOOK_EVERY)
                    told, before = self._done, told
                    advance(told - before)
        finally:
            self._stopped = True  # an interruption ends the threads too
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            failed, self._error = self._error, None  # kept, it would keep its frames, and they all weights
        advance(self._done - told)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed

    def _thread(self, landing: _Landing) -> None:
        try:
            landing.begin()
            while (task := self._next()) is not None:
                count = task(landing)
                with self._lock:
                    self._done += count
        except BaseException as error:
            self._error, self._stopped = self._error or error, True

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)
