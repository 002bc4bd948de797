"""One stream of bytes from files into weights: several threads read, into place or through page-locked memory."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.jobs import Job, Run, as_rows, flat
from outpace.loading.weights import Extent

CHUNK = 8 << 20  # bytes that are read at once
DEVICE_CHUNK = 16 << 20  # on the way to an H200: 44 GB/s, with 8 MiB 36 to 39, since Python has work for each chunk
THREADS = 16
SPARE = 4  # slots of page-locked memory that are copied from while each thread fills one
LOOK_EVERY = 0.05  # seconds between looks at how far the threads are

Advance = Callable[[int], None]
"""Told how many more bytes are in place."""
Read = Callable[[np.ndarray, int], None]
"""Reads bytes of a stored tensor, from an offset on, into an array."""


class Group(Protocol):
    """Jobs that fill one weight, which then becomes something else: groups come one after the other."""

    nbytes: int
    """That are read."""
    held: int
    """Bytes that the weight takes until it has become something else."""

    def begin(self) -> Sequence[Job]:
        """Make room for the weight; its jobs."""

    def end(self) -> None:
        """All of them are done."""


def stream(
    jobs: Sequence[Job], device: torch.device, advance: Advance = lambda count: None, groups: Sequence[Group] = ()
) -> None:
    """Do all jobs, in the order of the files, then the groups. All places are on `device`."""
    copy = torch.cuda.Stream(device) if device.type == "cuda" else None
    total = sum(job.nbytes for job in jobs) + sum(group.nbytes for group in groups)
    chunk = CHUNK if copy is None else DEVICE_CHUNK
    threads = _threads(total, chunk)
    with _Files() as files:
        work = _Work(_tasks(jobs, groups, files, chunk))
        landings: list[_Landing] = [_Host() for _ in range(threads)]
        if copy is not None:
            copy.wait_stream(torch.cuda.current_stream(device))
            landings = [_Device(copy, _Ring(threads + SPARE, chunk))] * threads
        try:
            work.run(landings, advance)
        finally:
            if copy is not None:  # after an error too: nobody may get memory that is still written to
                copy.synchronize()


def _threads(total: int, chunk: int) -> int:
    return max(1, min(THREADS, len(os.sched_getaffinity(0)), total // chunk))


def lock_ahead(total: int, device: torch.device) -> None:
    """Lock the pages that a stream of so many bytes will take, beside what is done until then: 8 ms for each slot.

    They are given back at once, to torch, which keeps them for whoever asks for as many.
    """
    count = _threads(total, DEVICE_CHUNK) + SPARE

    def lock() -> None:
        with torch.cuda.device(device), suppress(RuntimeError):  # the stream says what is wrong, if it is still so then
            held = [_page_locked(DEVICE_CHUNK) for _ in range(count)]
            del held

    if device.type == "cuda" and total >= DEVICE_CHUNK:
        threading.Thread(target=lock, name="outpace-lock-pages", daemon=True).start()


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
    """How a thread gets bytes into place."""

    def begin(self) -> None:
        """Called first, by each thread."""

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


class _Slot:
    """Page-locked memory, and when it has been copied. Whoever needs it first locks it, while others read already."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._array = self._memory.numpy()
        self.copied = torch.cuda.Event()

    def grow(self, size: int) -> None:
        """Hold so many bytes at least."""
        if len(self._memory) < size:
            self._memory = _page_locked(size)
            self._array = self._memory.numpy()

    def fill(self, count: int, read: Read, offset: int) -> Tensor:
        """So many bytes."""
        read(self._array[:count], offset)
        return self._memory[:count]


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _Ring:
    """Slots that all threads share. The one that was filled longest ago is filled next, once it has been copied."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(count):
            self._slots.put(_Slot())

    @contextmanager
    def slot(self, count: int) -> Iterator[_Slot]:
        """One that nobody copies from any more: there are more of them than threads, and each thread has one."""
        slot = self._slots.get()
        try:
            slot.copied.synchronize()  # at once where nothing was copied yet
            slot.grow(max(count, self._size))  # nothing yet, or a row of more than a chunk
            yield slot
        finally:
            self._slots.put(slot)


class _Device:
    """Onto a GPU: through slots of page-locked memory, from which one stream copies."""

    def __init__(self, copies: torch.cuda.Stream, ring: _Ring) -> None:
        self._copies, self._ring = copies, ring

    def begin(self) -> None:
        torch.cuda.set_stream(self._copies)  # and its device, for this thread: the first GPU stays as it is

    def copy(self, place: Tensor, read: Read, offset: int) -> None:
        with self._ring.slot(len(place)) as slot:
            place.copy_(slot.fill(len(place), read, offset), non_blocking=True)
            slot.copied.record(self._copies)

    def convert(self, job: Job, run: Run, read: Read) -> None:
        with self._ring.slot(run.nbytes) as slot:
            data = slot.fill(run.nbytes, read, run.offset)
            job.write(run, as_rows(job, run, data.to(self._copies.device, non_blocking=True)))
            slot.copied.record(self._copies)


Task = Callable[[_Landing], int]
"""A piece of work for one thread; returns the bytes that it put in place."""


def _tasks(jobs: Sequence[Job], groups: Sequence[Group], files: _Files, chunk: int) -> Iterator[Task]:
    """In the order of the files; tensors that are made on the host come last, one at a time; then groups, in order."""
    stored = [(job.piece.place, job) for job in jobs if isinstance(job.piece.place, Extent)]
    for extent, job in sorted(stored, key=lambda pair: (pair[0].path, pair[0].offset)):
        yield from _pieces(job, files.reader(extent), chunk)
    alone = threading.Lock()
    for job in jobs:
        if not isinstance(job.piece.place, Extent):
            yield _made(job, alone, chunk)
    largest = max((group.held for group in groups), default=0)
    room = _Room(max(THREADS * chunk, largest))  # work for all threads, or one weight
    for group in groups:
        yield from _grouped(group, files, alone, chunk, room)


class _Room:
    """Memory that groups share: one that would take too much waits until others have ended.

    A group is waited for while its tasks are with other threads, all of them: they are handed out in order.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._held, self._failed = limit, 0, False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Wait for so many bytes; what is larger than the limit is alone."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._held or self._held + size <= self._limit)
            self._held += size

    def give_back(self, size: int) -> None:
        """A group has ended."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def fail(self) -> None:
        """A group will never end: nobody waits any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


def _ended(group: Group, room: _Room) -> None:
    group.end()
    room.give_back(group.held)


def _grouped(group: Group, files: _Files, alone: threading.Lock, chunk: int, room: _Room) -> Iterator[Task]:
    """The tasks of a group; the thread that does the last one ends the group."""
    tasks: list[Task] = []
    room.take(group.held)
    for job in group.begin():
        extent = job.piece.place
        tasks += _pieces(job, files.reader(extent), chunk) if isinstance(extent, Extent) else [_made(job, alone, chunk)]
    if not tasks:
        _ended(group, room)
    left = _Countdown(len(tasks), partial(_ended, group, room))
    del group  # the last task lets go of it
    for task in tasks:
        yield partial(_counted, task=task, left=left, room=room)


class _Countdown:
    """Calls something after so many calls of `done`."""

    def __init__(self, count: int, end: Callable[[], None]) -> None:
        self._count, self._end = count, end
        self._lock = threading.Lock()

    def done(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._end()


def _counted(landing: _Landing, task: Task, left: _Countdown, room: _Room) -> int:
    try:
        count = task(landing)
        left.done()
    except BaseException:
        room.fail()
        raise
    return count


def _pieces(job: Job, read: Read, chunk: int) -> Iterator[Task]:
    if not job.direct:
        for run in job.runs(chunk):
            yield partial(_converted, job=job, run=run, read=read)
        return
    place = flat(job.place)
    first = next(job.runs(job.nbytes or 1), None)
    before = 0 if first is None else first.offset
    for start in range(0, len(place), chunk):
        yield partial(_copied, place=place, span=slice(start, start + chunk), read=read, before=before)


def _copied(landing: _Landing, place: Tensor, span: slice, read: Read, before: int) -> int:
    part = place[span]
    landing.copy(part, read, before + span.start)
    return len(part)


def _converted(landing: _Landing, job: Job, run: Run, read: Read) -> int:
    landing.convert(job, run, read)
    return run.nbytes


def _made(job: Job, alone: threading.Lock, chunk: int) -> Task:
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

            return sum(each(landing) for each in _pieces(job, read, chunk))

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
                del task  # or the weight that it filled would stay until this thread has another one
                with self._lock:
                    self._done += count
        except BaseException as error:
            self._error, self._stopped = self._error or error, True

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)
