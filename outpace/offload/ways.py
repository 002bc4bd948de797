"""Copies a layer into its slot: from host memory or a file to a CPU, from page-locked memory to a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import OffloadError
from outpace.offload.store_read import Reading, UnitFile
from outpace.offload.units import Form


@dataclass(frozen=True)
class Stores:
    """Where the units are."""

    forms: Sequence[Form]
    memory: Mapping[int, Tensor]
    """Units in host memory."""
    file: UnitFile | None = None
    in_file: Mapping[int, int] | None = None
    """Unit -> the index of its dense part in the file; its experts follow."""

    def read(self, unit: int, experts: Sequence[int], into: Tensor) -> "Reads":
        """Start to read the dense part of a unit and these experts from the file."""
        return self._read(unit, [0, *(1 + expert for expert in experts)], into)

    def read_experts(self, unit: int, experts: Sequence[int], into: Tensor) -> "Reads":
        """Start to read experts to their places in a unit."""
        return self._read(unit, [1 + expert for expert in experts], into)

    def _read(self, unit: int, parts: Sequence[int], into: Tensor) -> "Reads":
        assert self.file is not None, "the unit is in a file"
        assert self.in_file is not None, "the unit is in a file"
        first, places = self.in_file[unit], self.forms[unit].parts
        return Reads([self.file.read(first + part, into[places[part]]) for part in parts])

    def pieces(self, unit: int, experts: Sequence[int], of: Tensor | None = None) -> dict[int, Tensor]:
        """Views of a unit's experts, in host memory or in `of`."""
        whole = self.memory[unit] if of is None else of
        return {expert: whole[self.forms[unit].expert(expert)] for expert in experts}

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Reads:
    """Parts of a unit that are being read into memory; after `wait` nothing is written there any more."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = list(readings)

    def wait(self) -> None:
        """Wait for all reads; OffloadError if one of them failed."""
        failed: OffloadError | None = None
        for reading in self._readings:
            try:
                reading.wait()
            except OffloadError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def add(self, others: "Reads") -> None:
        self._readings += others._readings

    def settle(self) -> None:
        """Wait for reads whose result is not needed."""
        with suppress(OffloadError):
            self.wait()


class Way(ABC):
    """How units get into slots. All methods act on what is launched after them."""

    capturable = False
    """Whether copies can be part of a CUDA graph."""

    def __init__(self, slots: Sequence[Tensor], stores: Stores) -> None:
        self._slots, self._stores = slots, stores

    @abstractmethod
    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        """Start to fill a slot as soon as everything launched so far has run.

        The dense part and `experts` come from host memory or the file, `kept` from cached pieces on the device.
        """

    @abstractmethod
    def arrive(self, slot: int) -> None:
        """Make later launches wait until the slot is filled; raises if loading failed."""

    @abstractmethod
    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        """Copy experts to the slot before later launches.

        `kept` come from cached pieces, `missing` from host memory or the file. Raises if reading failed.
        """

    def keep(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> None:
        """Copy experts from a slot into pieces, after the copies launched so far."""
        _copy_out(self._stores.forms[unit], self._slots[slot], pieces)

    @abstractmethod
    def forget(self) -> None:
        """Wait for everything that is being loaded, and drop it."""

    def close(self) -> None:
        self.forget()
        self._stores.close()

    def _fill(
        self, unit: int, slot: int, stored: Tensor | None, experts: Sequence[int], kept: Mapping[int, Tensor]
    ) -> None:
        """Copy the dense part and some experts of a stored unit, if it is given, and cached pieces into a slot."""
        form, into = self._stores.forms[unit], self._slots[slot]
        if stored is not None:
            for run in form.runs(experts):
                into[run].copy_(stored[run], non_blocking=True)
        _copy_in(form, into, kept)


class ToHost(Way):
    """On a CPU: copies layers from memory; threads of the file read the others directly into their slots."""

    def __init__(self, slots: Sequence[Tensor], stores: Stores) -> None:
        super().__init__(slots, stores)
        self._reading = [Reads(()) for _ in slots]

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        self._reading[slot].settle()
        stored = self._stores.memory.get(unit)
        self._reading[slot] = Reads(()) if stored is not None else self._stores.read(unit, experts, self._slots[slot])
        self._fill(unit, slot, stored, experts, kept)

    def arrive(self, slot: int) -> None:
        reading, self._reading[slot] = self._reading[slot], Reads(())
        reading.wait()

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        stores, reads = self._stores, Reads(())
        if unit in stores.memory:
            kept = {**kept, **stores.pieces(unit, missing)}
        else:
            reads = stores.read_experts(unit, missing, self._slots[slot])
        try:
            self._fill(unit, slot, None, (), kept)
        finally:
            reads.wait()

    def forget(self) -> None:
        for reading in self._reading:
            reading.settle()
        self._reading = [Reads(()) for _ in self._slots]


class ToDevice(Way):
    """From page-locked memory to a GPU: copies on their own stream, which a CUDA graph can capture."""

    capturable = True

    def __init__(self, slots: Sequence[Tensor], stores: Stores) -> None:
        super().__init__(slots, stores)
        self._copies = torch.cuda.Stream(slots[0].device)
        self._arrived: list[torch.cuda.Event | None] = [None] * len(slots)

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        with self._after(now()) as self._arrived[slot]:
            self._fill(unit, slot, self._stores.memory[unit], experts, kept)

    def arrive(self, slot: int) -> None:
        there, self._arrived[slot] = self._arrived[slot], None
        if there is not None:
            torch.cuda.current_stream().wait_event(there)

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        self._bring(unit, slot, {**kept, **self._stores.pieces(unit, missing)})

    def keep(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> None:
        with torch.cuda.stream(self._copies):
            super().keep(unit, slot, pieces)

    def forget(self) -> None:
        self._copies.synchronize()
        self._arrived = [None] * len(self._slots)

    def _bring(self, unit: int, slot: int, pieces: Mapping[int, Tensor]) -> torch.cuda.Event:
        """Copy experts to the slot before later launches; returns the event at which the copy is done."""
        with self._after(now()) as there:
            self._fill(unit, slot, None, (), pieces)
        torch.cuda.current_stream().wait_event(there)
        return there

    @contextmanager
    def _after(self, event: torch.cuda.Event) -> Iterator[torch.cuda.Event]:
        """Launch copies after an event; yields the event at which they are done."""
        self._copies.wait_event(event)
        there = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            yield there
        there.record(self._copies)


def now() -> torch.cuda.Event:
    """The event at which everything launched so far has run."""
    event = torch.cuda.Event()
    event.record()
    return event


def _copy_in(form: Form, slot: Tensor, pieces: Mapping[int, Tensor]) -> None:
    for expert, piece in pieces.items():
        slot[form.expert(expert)].copy_(piece, non_blocking=True)


def _copy_out(form: Form, slot: Tensor, pieces: Mapping[int, Tensor]) -> None:
    for expert, piece in pieces.items():
        piece.copy_(slot[form.expert(expert)], non_blocking=True)
