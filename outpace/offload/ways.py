"""How the bytes of a layer get into its slot: from host memory or from a file, on a CPU or to a GPU."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from outpace.errors import OffloadError
from outpace.offload.store import Reading, UnitFile


class Way(Protocol):
    """How a unit gets into a slot."""

    capturable: bool
    """Whether copies can be part of a CUDA graph."""

    def load(self, unit: int, slot: int) -> None:
        """Begin to fill a slot, once everything launched so far has run."""

    def arrive(self, slot: int) -> None:
        """What is launched from now on finds the slot filled; raises what went wrong."""

    def forget(self) -> None:
        """Wait for what is on its way, whatever becomes of it."""

    def close(self) -> None:
        """Let go of threads and files."""


@dataclass(frozen=True)
class Stores:
    """Where the units are."""

    memory: Mapping[int, Tensor]
    """Units in host memory."""
    file: UnitFile | None = None
    in_file: Mapping[int, int] | None = None
    """Units in the file, and their places there."""

    def read(self, unit: int, into: Tensor) -> Reading:
        """Begin to read a unit from the file."""
        assert self.file is not None, "the unit is in a file"
        assert self.in_file is not None, "the unit is in a file"
        return self.file.read(self.in_file[unit], into)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


class ToHost:
    """On a CPU: layers in memory are copied, layers in a file are read into their slots by its threads."""

    capturable = False

    def __init__(self, slots: Sequence[Tensor], stores: Stores) -> None:
        self._slots, self._stores = slots, stores
        self._reading: list[Reading | None] = [None] * len(slots)

    def load(self, unit: int, slot: int) -> None:
        """See `Way`."""
        self._finish(slot)
        if unit in self._stores.memory:
            stored = self._stores.memory[unit]
            self._slots[slot][: len(stored)].copy_(stored)
        else:
            self._reading[slot] = self._stores.read(unit, self._slots[slot])

    def arrive(self, slot: int) -> None:
        """See `Way`."""
        reading, self._reading[slot] = self._reading[slot], None
        if reading is not None:
            reading.wait()

    def forget(self) -> None:
        """See `Way`."""
        for slot in range(len(self._slots)):
            self._finish(slot)

    def close(self) -> None:
        """See `Way`."""
        self.forget()
        self._stores.close()

    def _finish(self, slot: int) -> None:
        """Nothing is written to a slot any more."""
        reading, self._reading[slot] = self._reading[slot], None
        _settle(reading)


class ToDevice:
    """From page-locked memory to a GPU: copies on a stream of their own, that a graph can hold."""

    capturable = True

    def __init__(self, slots: Sequence[Tensor], stores: Stores) -> None:
        self._slots, self._stores = slots, stores
        self._copies = torch.cuda.Stream(slots[0].device)
        self._arrived: list[torch.cuda.Event | None] = [None] * len(slots)

    def load(self, unit: int, slot: int) -> None:
        """See `Way`."""
        self._arrived[slot] = _copied(self._stores.memory[unit], self._slots[slot], self._copies, _now())

    def arrive(self, slot: int) -> None:
        """See `Way`."""
        there, self._arrived[slot] = self._arrived[slot], None
        if there is not None:
            torch.cuda.current_stream().wait_event(there)

    def forget(self) -> None:
        """See `Way`."""
        self._copies.synchronize()
        self._arrived = [None] * len(self._slots)

    def close(self) -> None:
        """See `Way`."""
        self.forget()


class ToDeviceFromFile:
    """To a GPU, of units some of which are in a file: a thread reads ahead into page-locked buffers and copies."""

    capturable = False

    def __init__(self, slots: Sequence[Tensor], stores: Stores, buffers: Sequence[Tensor]) -> None:
        self._slots, self._stores = slots, stores
        self._copies = torch.cuda.Stream(slots[0].device)
        self._coming: list[Future[torch.cuda.Event] | None] = [None] * len(slots)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        assert stores.in_file, "else ToDevice does it"
        self._ahead = _Ahead(stores, buffers)
        self._thread = threading.Thread(target=self._work, name="outpace-stream", daemon=True)
        self._thread.start()

    def load(self, unit: int, slot: int) -> None:
        """See `Way`."""
        coming: Future[torch.cuda.Event] = Future()
        self._coming[slot] = coming
        self._orders.put(_Order(unit, slot, _now(), coming))

    def arrive(self, slot: int) -> None:
        """See `Way`."""
        coming, self._coming[slot] = self._coming[slot], None
        if coming is not None:
            torch.cuda.current_stream().wait_event(coming.result())

    def forget(self) -> None:
        """See `Way`."""
        for coming in self._coming:
            if coming is not None:
                coming.exception()  # waits
        self._coming = [None] * len(self._slots)
        self._copies.synchronize()

    def close(self) -> None:
        """See `Way`."""
        self._orders.put(None)
        self._thread.join()
        self._copies.synchronize()
        self._stores.close()

    def _work(self) -> None:
        torch.cuda.set_device(self._slots[0].device)
        while (order := self._orders.get()) is not None:
            try:
                order.coming.set_result(self._fetch(order))
            except BaseException as error:
                order.coming.set_exception(error)
        self._ahead.forget()

    def _fetch(self, order: "_Order") -> torch.cuda.Event:
        slot, memory = self._slots[order.slot], self._stores.memory
        if order.unit in memory:
            return _copied(memory[order.unit], slot, self._copies, order.free)
        buffer = self._ahead.take(order.unit)
        there = _copied(buffer, slot, self._copies, order.free)
        there.synchronize()  # at least twice as fast as the file: the buffer is read into again at once
        self._ahead.give_back(buffer)
        return there


@dataclass(frozen=True)
class _Order:
    unit: int
    slot: int
    free: torch.cuda.Event
    coming: "Future[torch.cuda.Event]"


class _Ahead:
    """Units of a file on their way into buffers, in the order in which steps need them."""

    def __init__(self, stores: Stores, buffers: Sequence[Tensor]) -> None:
        self._stores, self._free = stores, list(buffers)
        self._units = sorted(stores.in_file or ())
        self._under_way: deque[tuple[int, Tensor, Reading]] = deque()
        self._next = 0

    def take(self, unit: int) -> Tensor:
        """The buffer with this unit, once it is there; other units are read behind it."""
        if not any(each == unit for each, _, _ in self._under_way):
            self.forget()
            self._next = self._units.index(unit)
        self._read_on()
        while True:
            found, buffer, reading = self._under_way.popleft()
            if found == unit:
                break
            _settle(reading)  # steps left it out
            self._free.append(buffer)
        try:
            self._wait(reading, unit, buffer)
        except BaseException:
            self._free.append(buffer)
            raise
        return buffer

    def _wait(self, reading: Reading, unit: int, buffer: Tensor) -> None:
        """What was read long ago may have failed for a reason that is gone by now: it is read once more."""
        try:
            reading.wait()
        except OffloadError:
            self._stores.read(unit, buffer).wait()

    def give_back(self, buffer: Tensor) -> None:
        """It has been copied: the next unit is read into it."""
        self._free.append(buffer)
        self._read_on()

    def forget(self) -> None:
        """Wait for all reads, and drop what they bring."""
        while self._under_way:
            _, buffer, reading = self._under_way.popleft()
            _settle(reading)
            self._free.append(buffer)

    def _read_on(self) -> None:
        while self._free and len(self._under_way) < len(self._units):
            unit, buffer = self._units[self._next], self._free.pop()
            self._under_way.append((unit, buffer, self._stores.read(unit, buffer)))
            self._next = (self._next + 1) % len(self._units)


def _now() -> torch.cuda.Event:
    """When everything launched so far has run."""
    event = torch.cuda.Event()
    event.record()
    return event


def _copied(source: Tensor, slot: Tensor, stream: torch.cuda.Stream, after: torch.cuda.Event) -> torch.cuda.Event:
    """Copy on a stream, after something; when it is done."""
    stream.wait_event(after)
    length = min(len(source), len(slot))
    with torch.cuda.stream(stream):
        slot[:length].copy_(source[:length], non_blocking=True)
    there = torch.cuda.Event()
    there.record(stream)
    return there


def _settle(reading: Reading | None) -> None:
    """Wait for a read that nobody needs."""
    if reading is not None:
        with suppress(OffloadError):
            reading.wait()
