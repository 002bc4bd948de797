"""How the bytes of a layer get into its slot: from host memory or from a file, on a CPU or to a GPU."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from outpace.errors import OffloadError
from outpace.offload.store import Reading, UnitFile
from outpace.offload.units import Form


class Way(Protocol):
    """How a unit gets into a slot."""

    capturable: bool
    """Whether copies can be part of a CUDA graph."""

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        """Begin to fill a slot, once everything launched so far has run.

        The dense part comes from where the unit is, and so do these experts; those kept come from pieces of the device.
        """

    def arrive(self, slot: int) -> None:
        """What is launched from now on finds the slot filled; raises what went wrong."""

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        """What is launched from now on finds these experts too: from pieces of the device, or from where the unit is.

        Raises what went wrong.
        """

    def keep(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> None:
        """Copy experts from a slot into pieces, once what was copied before is there."""

    def forget(self) -> None:
        """Wait for what is on its way, whatever becomes of it."""

    def close(self) -> None:
        """Let go of threads and files."""


@dataclass(frozen=True)
class Stores:
    """Where the units are."""

    forms: Sequence[Form]
    memory: Mapping[int, Tensor]
    """Units in host memory."""
    file: UnitFile | None = None
    in_file: Mapping[int, int] | None = None
    """Units in the file, and where their dense part is there; the experts follow it."""

    def read(self, unit: int, experts: Sequence[int], into: Tensor) -> "Reads":
        """Begin to read the dense part of a unit from the file, and these experts."""
        return self._read(unit, [0, *(1 + expert for expert in experts)], into)

    def pieces(self, unit: int, experts: Sequence[int], of: Tensor | None = None) -> dict[int, Tensor]:
        """Experts of a unit, as it is in memory or in `of`."""
        whole = self.memory[unit] if of is None else of
        return {expert: whole[self.forms[unit].expert(expert)] for expert in experts}

    def read_experts(self, unit: int, experts: Sequence[int], into: Tensor) -> "Reads":
        """Begin to read experts to where they lie in a unit."""
        return self._read(unit, [1 + expert for expert in experts], into)

    def _read(self, unit: int, parts: Sequence[int], into: Tensor) -> "Reads":
        assert self.file is not None, "the unit is in a file"
        assert self.in_file is not None, "the unit is in a file"
        first, places = self.in_file[unit], self.forms[unit].parts
        return Reads([self.file.read(first + part, into[places[part]]) for part in parts])

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


class Reads:
    """Parts of a unit on their way into memory; nobody writes there any more once `wait` has returned or raised."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = list(readings)

    def wait(self) -> None:
        """Until all have ended; OffloadError if one has failed."""
        failed: OffloadError | None = None
        for reading in self._readings:
            try:
                reading.wait()
            except OffloadError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def add(self, others: "Reads") -> None:
        """Wait for these too."""
        self._readings += others._readings


class ToHost:
    """On a CPU: layers in memory are copied, layers in a file are read into their slots by its threads."""

    capturable = False

    def __init__(self, slots: Sequence[Tensor], stores: Stores) -> None:
        self._slots, self._stores = slots, stores
        self._reading: list[Reads | None] = [None] * len(slots)

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        """See `Way`."""
        self._finish(slot)
        form, into, memory = self._stores.forms[unit], self._slots[slot], self._stores.memory
        if unit in memory:
            _copy_runs(form, into, memory[unit], experts)
        else:
            self._reading[slot] = self._stores.read(unit, experts, into)
        _copy_in(form, into, kept)

    def arrive(self, slot: int) -> None:
        """See `Way`."""
        reading, self._reading[slot] = self._reading[slot], None
        if reading is not None:
            reading.wait()

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        """See `Way`."""
        into, stores = self._slots[slot], self._stores
        if unit in stores.memory:
            kept = {**kept, **stores.pieces(unit, missing)}
        reads = Reads(()) if unit in stores.memory else stores.read_experts(unit, missing, into)
        try:
            _copy_in(stores.forms[unit], into, kept)
        finally:
            reads.wait()

    def keep(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> None:
        """See `Way`."""
        _copy_out(self._stores.forms[unit], self._slots[slot], pieces)

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

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        """See `Way`."""
        with _after(self._copies, _now()) as self._arrived[slot]:
            _copy_runs(self._stores.forms[unit], self._slots[slot], self._stores.memory[unit], experts)
            _copy_in(self._stores.forms[unit], self._slots[slot], kept)

    def arrive(self, slot: int) -> None:
        """See `Way`."""
        there, self._arrived[slot] = self._arrived[slot], None
        if there is not None:
            torch.cuda.current_stream().wait_event(there)

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        """See `Way`."""
        every = {**kept, **self._stores.pieces(unit, missing)}
        with _after(self._copies, _now()) as there:
            _copy_in(self._stores.forms[unit], self._slots[slot], every)
        torch.cuda.current_stream().wait_event(there)

    def keep(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> None:
        """See `Way`."""
        with torch.cuda.stream(self._copies):
            _copy_out(self._stores.forms[unit], self._slots[slot], pieces)

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

    def __init__(
        self, slots: Sequence[Tensor], stores: Stores, buffers: Sequence[Tensor], for_experts: Tensor | None
    ) -> None:
        """buffers: for units; for_experts: one for the experts of a unit, if there are any."""
        self._slots, self._stores = slots, stores
        self._for_experts = for_experts
        self._copied: torch.cuda.Event | None = None  # when nothing is copied from there any more
        self._copies = torch.cuda.Stream(slots[0].device)
        self._coming: list[Future[torch.cuda.Event] | None] = [None] * len(slots)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        assert stores.in_file, "else ToDevice does it"
        self._ahead = _Ahead(stores, buffers)
        self._thread = threading.Thread(target=self._work, name="outpace-stream", daemon=True)
        self._thread.start()

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        """See `Way`."""
        coming: Future[torch.cuda.Event] = Future()
        self._coming[slot] = coming
        self._orders.put(_Order(unit, slot, experts, kept, _now(), coming))

    def arrive(self, slot: int) -> None:
        """See `Way`."""
        coming, self._coming[slot] = self._coming[slot], None
        if coming is not None:
            torch.cuda.current_stream().wait_event(coming.result())

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        """See `Way`."""
        stores, buffer = self._stores, None
        if unit not in stores.memory:
            buffer = self._for_experts
            assert buffer is not None, "there are experts in the file"
            if self._copied is not None:
                self._copied.synchronize()
            stores.read_experts(unit, missing, buffer).wait()
        every = {**kept, **stores.pieces(unit, missing, buffer)}
        with _after(self._copies, _now()) as there:
            _copy_in(stores.forms[unit], self._slots[slot], every)
        self._copied = there
        torch.cuda.current_stream().wait_event(there)

    def keep(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> None:
        """See `Way`."""
        with torch.cuda.stream(self._copies):
            _copy_out(self._stores.forms[unit], self._slots[slot], pieces)

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
        slot, form = self._slots[order.slot], self._stores.forms[order.unit]
        stored = self._stores.memory.get(order.unit)
        buffer = self._ahead.take(order.unit, order.experts) if stored is None else stored
        with _after(self._copies, order.free) as there:
            _copy_runs(form, slot, buffer, order.experts)
            _copy_in(form, slot, order.kept)
        if stored is not None:
            return there
        there.synchronize()  # at least twice as fast as the file: the buffer is read into again at once
        self._ahead.give_back(buffer)
        return there


@dataclass(frozen=True)
class _Order:
    unit: int
    slot: int
    experts: Sequence[int]
    kept: Mapping[int, Tensor]
    free: torch.cuda.Event
    coming: "Future[torch.cuda.Event]"


class _Ahead:
    """Units of a file on their way into buffers, in the order in which steps need them."""

    def __init__(self, stores: Stores, buffers: Sequence[Tensor]) -> None:
        self._stores, self._free = stores, list(buffers)
        self._units = sorted(stores.in_file or ())
        self._under_way: deque[tuple[int, Sequence[int], Tensor, Reads]] = deque()
        self._next = 0
        self._all = False  # whether steps need all experts, those on the device aside
        self._experts: dict[int, Sequence[int]] = {}  # which these were the last time

    def take(self, unit: int, experts: Sequence[int]) -> Tensor:
        """The buffer with this unit, with these experts, once it is there; other units are read behind it."""
        if self._stores.forms[unit].experts:
            self._all, self._experts[unit] = bool(experts), experts
        if not any(each == unit for each, _, _, _ in self._under_way):
            self.forget()
            self._next = self._units.index(unit)
        self._read_on()
        while True:
            found, there, buffer, reading = self._under_way.popleft()
            if found == unit:
                break
            _settle(reading)  # steps left it out
            self._free.append(buffer)
        reading.add(self._stores.read_experts(unit, sorted(set(experts).difference(there)), buffer))
        try:
            self._wait(reading, unit, buffer, experts)
        except BaseException:
            self._free.append(buffer)
            raise
        return buffer

    def _wait(self, reading: Reads, unit: int, buffer: Tensor, experts: Sequence[int]) -> None:
        """What was read long ago may have failed for a reason that is gone by now: it is read once more."""
        try:
            reading.wait()
        except OffloadError:
            self._stores.read(unit, experts, buffer).wait()

    def give_back(self, buffer: Tensor) -> None:
        """It has been copied: the next unit is read into it."""
        self._free.append(buffer)
        self._read_on()

    def forget(self) -> None:
        """Wait for all reads, and drop what they bring."""
        while self._under_way:
            _, _, buffer, reading = self._under_way.popleft()
            _settle(reading)
            self._free.append(buffer)

    def _read_on(self) -> None:
        while self._free and len(self._under_way) < len(self._units):
            unit, buffer = self._units[self._next], self._free.pop()
            every = range(self._stores.forms[unit].experts)
            experts = (self._experts.get(unit) or every) if self._all else ()
            self._under_way.append((unit, experts, buffer, self._stores.read(unit, experts, buffer)))
            self._next = (self._next + 1) % len(self._units)


def _now() -> torch.cuda.Event:
    """When everything launched so far has run."""
    event = torch.cuda.Event()
    event.record()
    return event


@contextmanager
def _after(stream: torch.cuda.Stream, event: torch.cuda.Event) -> Iterator[torch.cuda.Event]:
    """Launch on a stream, after something; the event when it is done."""
    stream.wait_event(event)
    there = torch.cuda.Event()
    with torch.cuda.stream(stream):
        yield there
    there.record(stream)


def _copy_runs(form: Form, slot: Tensor, unit: Tensor, experts: Sequence[int]) -> None:
    """The dense part of a unit and some of its experts to a slot."""
    for run in form.runs(experts):
        slot[run].copy_(unit[run], non_blocking=True)


def _copy_in(form: Form, slot: Tensor, pieces: Mapping[int, Tensor]) -> None:
    """Experts from pieces to their places in a slot."""
    for expert, piece in pieces.items():
        slot[form.expert(expert)].copy_(piece, non_blocking=True)


def _copy_out(form: Form, slot: Tensor, pieces: Mapping[int, Tensor]) -> None:
    """Experts from their places in a slot to pieces."""
    for expert, piece in pieces.items():
        piece.copy_(slot[form.expert(expert)], non_blocking=True)


def _settle(reading: Reads | None) -> None:
    """Wait for a read that nobody needs."""
    if reading is not None:
        with suppress(OffloadError):
            reading.wait()
