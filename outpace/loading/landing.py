"""Moves bytes of files into weights: directly on a CPU, through page-locked memory to a GPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.jobs import Job, Run, as_rows
from outpace.loading.weights import Extent

CHUNK = 8 << 20  # bytes of one read
Read = Callable[[np.ndarray, int], None]
"""Reads bytes of a stored tensor, from an offset on, into an array."""


class Files:
    """Keeps files open while they are read."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._open.values():
            os.close(number)

    def reader(self, extent: Extent) -> Read:
        """A function that reads relative to the start of a tensor."""
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


class Landing(Protocol):
    """Moves bytes into weights."""

    def begin(self) -> None:
        """Called by each thread before anything else."""

    def copy(self, place: Tensor, read: Read, offset: int) -> None:
        """Copy bytes without conversion. place: a range of bytes of a weight."""

    def convert(self, job: Job, run: Run, read: Read) -> None:
        """Copy rows that are converted or not contiguous."""


class Host:
    """Into host memory."""

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
    """A buffer of page-locked memory, and the event after its copy.

    The first thread that uses it allocates it, so that several buffers are allocated in parallel.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._array = self._memory.numpy()
        self.copied = torch.cuda.Event()

    def grow(self, size: int) -> None:
        """Ensure at least this size."""
        if len(self._memory) < size:
            self._memory = page_locked(size)
            self._array = self._memory.numpy()

    def fill(self, count: int, read: Read, offset: int) -> Tensor:
        """Read `count` bytes into the buffer."""
        read(self._array[:count], offset)
        return self._memory[:count]


def page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class StagingRing:
    """Slots that all threads share; the least recently filled one is reused next, after it has been copied."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(count):
            self._slots.put(_Slot())

    @contextmanager
    def slot(self, count: int) -> Iterator[_Slot]:
        """A slot whose copy is done. There are more slots than threads, and each thread uses one."""
        slot = self._slots.get()
        try:
            slot.copied.synchronize()  # returns immediately at the first use
            slot.grow(max(count, self._size))  # at the first use, or for a row larger than a chunk
            yield slot
        finally:
            self._slots.put(slot)


class Device:
    """Onto a GPU, through slots of page-locked memory and one copy stream."""

    def __init__(self, copies: torch.cuda.Stream, ring: StagingRing) -> None:
        self._copies, self._ring = copies, ring

    def begin(self) -> None:
        torch.cuda.set_stream(self._copies)  # for this thread only; also selects its device

    def copy(self, place: Tensor, read: Read, offset: int) -> None:
        with self._ring.slot(len(place)) as slot:
            place.copy_(slot.fill(len(place), read, offset), non_blocking=True)
            slot.copied.record(self._copies)

    def convert(self, job: Job, run: Run, read: Read) -> None:
        with self._ring.slot(run.nbytes) as slot:
            data = slot.fill(run.nbytes, read, run.offset)
            job.write(run, as_rows(job, run, data.to(self._copies.device, non_blocking=True)))
            slot.copied.record(self._copies)
