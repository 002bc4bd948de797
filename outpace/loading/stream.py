"""Reads files in order with several threads, and moves the bytes into weights."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.jobs import Job, Run, flat
from outpace.loading.landing import CHUNK, Device, Files, Host, Landing, Read, StagingRing, page_locked
from outpace.loading.weights import Extent

DEVICE_CHUNK = 16 << 20  # to an H200 44 GB/s; with 8 MiB 36 to 39, because of Python's work for each chunk
THREADS = 16
SPARE = 4  # slots of page-locked memory that are being copied while each thread fills one
LOOK_EVERY = 0.05  # seconds between progress reports

Advance = Callable[[int], None]
"""Called with the number of bytes that were loaded since the last call."""


class Group(Protocol):
    """Jobs that fill one weight, which is then converted; groups run one after the other."""

    nbytes: int
    """Bytes that are read."""
    held: int
    """Bytes of the weight until it is converted."""

    def begin(self) -> Sequence[Job]:
        """Allocate the weight; returns its jobs."""

    def end(self) -> None:
        """Convert the weight, after all jobs are done."""


def stream(
    jobs: Sequence[Job], device: torch.device, advance: Advance = lambda count: None, groups: Sequence[Group] = ()
) -> None:
    """Run all jobs in the order of the files, then the groups. All destinations are on `device`."""
    copy = torch.cuda.Stream(device) if device.type == "cuda" else None
    total = sum(job.nbytes for job in jobs) + sum(group.nbytes for group in groups)
    chunk = CHUNK if copy is None else DEVICE_CHUNK
    threads = _threads(total, chunk)
    with Files() as files:
        work = _Work(_tasks(jobs, groups, files, chunk))
        landings: list[Landing] = [Host() for _ in range(threads)]
        if copy is not None:
            copy.wait_stream(torch.cuda.current_stream(device))
            landings = [Device(copy, StagingRing(threads + SPARE, chunk))] * threads
        try:
            work.run(landings, advance)
        finally:
            if copy is not None:  # also after an error: memory must not be reused while it is written
                copy.synchronize()


def _threads(total: int, chunk: int) -> int:
    return max(1, min(THREADS, len(os.sched_getaffinity(0)), total // chunk))


def lock_ahead(total: int, device: torch.device) -> None:
    """Allocate the page-locked slots of a stream in the background, because each takes 8 ms.

    They are freed at once: torch's allocator keeps them for the stream.
    """
    count = _threads(total, DEVICE_CHUNK) + SPARE

    def lock() -> None:
        with torch.cuda.device(device), suppress(RuntimeError):  # the stream reports the error if it persists
            held = [page_locked(DEVICE_CHUNK) for _ in range(count)]
            del held

    if device.type == "cuda" and total >= DEVICE_CHUNK:
        threading.Thread(target=lock, name="outpace-lock-pages", daemon=True).start()


Task = Callable[[Landing], int]
"""A piece of work for one thread; returns the number of bytes that it loaded."""


def _tasks(jobs: Sequence[Job], groups: Sequence[Group], files: Files, chunk: int) -> Iterator[Task]:
    """Tasks in the order of the files; then tensors that are computed on the host, one at a time; then groups."""
    stored = [(job.piece.place, job) for job in jobs if isinstance(job.piece.place, Extent)]
    for extent, job in sorted(stored, key=lambda pair: (pair[0].path, pair[0].offset)):
        yield from _pieces(job, files.reader(extent), chunk)
    alone = threading.Lock()
    for job in jobs:
        if not isinstance(job.piece.place, Extent):
            yield _made(job, alone, chunk)
    largest = max((group.held for group in groups), default=0)
    room = _Room(max(THREADS * chunk, largest))  # enough for all threads, or for one weight
    for group in groups:
        yield from _grouped(group, files, alone, chunk, room)


class _Room:
    """A memory budget that groups share: a group that does not fit waits until others have ended.

    This cannot deadlock: tasks are handed out in order, so the tasks of earlier groups are already running.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._held, self._failed = limit, 0, False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Wait until `size` bytes are free; a larger request than the limit waits for all others."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._held or self._held + size <= self._limit)
            self._held += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def fail(self) -> None:
        """A group failed and will never end: stop waiting."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


def _grouped(group: Group, files: Files, alone: threading.Lock, chunk: int, room: _Room) -> Iterator[Task]:
    """The tasks of a group; the thread that runs the last one ends the group."""
    tasks: list[Task] = []
    room.take(group.held)
    for job in group.begin():
        extent = job.piece.place
        tasks += _pieces(job, files.reader(extent), chunk) if isinstance(extent, Extent) else [_made(job, alone, chunk)]
    ending = _Ending(group, len(tasks), room)
    del group  # the last task holds the only reference
    for task in tasks:
        yield partial(ending.run, task=task)


class _Ending:
    """Ends a group when its last task is done; if a task fails, waiters are released."""

    def __init__(self, group: Group, count: int, room: _Room) -> None:
        self._group, self._left, self._room = group, count, room
        self._lock = threading.Lock()
        if not count:
            self._end()

    def run(self, landing: Landing, task: Task) -> int:
        try:
            count = task(landing)
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._end()
        except BaseException:
            self._room.fail()
            raise
        return count

    def _end(self) -> None:
        self._group.end()
        self._room.give_back(self._group.held)


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


def _copied(landing: Landing, place: Tensor, span: slice, read: Read, before: int) -> int:
    part = place[span]
    landing.copy(part, read, before + span.start)
    return len(part)


def _converted(landing: Landing, job: Job, run: Run, read: Read) -> int:
    landing.convert(job, run, read)
    return run.nbytes


def _made(job: Job, alone: threading.Lock, chunk: int) -> Task:
    """A task that computes a tensor on the host. Only one runs at a time, so that at most one tensor is in memory."""

    def task(landing: Landing) -> int:
        make: Any = job.piece.place
        with alone:
            tensor: Tensor = make()
            if tuple(tensor.shape) != job.piece.shape or tensor.dtype != job.piece.dtype:
                raise ModelError(
                    f"model: a tensor of {tensor.dtype} {tuple(tensor.shape)} differs from what its file described"
                )
            data = flat(tensor.contiguous()).numpy()

            def read(into: np.ndarray, offset: int) -> None:
                into[:] = data[offset : offset + len(into)]

            return sum(each(landing) for each in _pieces(job, read, chunk))

    return task


class _Work:
    """Runs tasks in several threads; the first error stops all of them."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._done = 0
        self._error: BaseException | None = None
        self._stopped = False

    def run(self, landings: Sequence[Landing], advance: Advance) -> None:
        """Run all tasks; the error of any thread is raised here."""
        threads = [threading.Thread(target=self._thread, args=[each], name="outpace-load") for each in landings]
        reported = 0
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(LOOK_EVERY)
                    reported, before = self._done, reported
                    advance(reported - before)
        finally:
            self._stopped = True  # stop the threads after an interrupt too
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            failed, self._error = self._error, None  # a stored error would keep its frames and all weights alive
        advance(self._done - reported)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed

    def _thread(self, landing: Landing) -> None:
        try:
            landing.begin()
            while (task := self._next()) is not None:
                count = task(landing)
                del task  # or its weight would stay alive until the next task
                with self._lock:
                    self._done += count
        except BaseException as error:
            self._error, self._stopped = self._error or error, True

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)
