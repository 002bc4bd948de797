"""Copies layers to a GPU when some of them are in a file: a thread reads ahead into page-locked buffers."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from outpace.errors import OffloadError
from outpace.offload.ways import Reads, Stores, ToDevice, now


class ToDeviceFromFile(ToDevice):
    """To a GPU, with some units in a file: a thread reads ahead into page-locked buffers and launches the copies."""

    capturable = False

    def __init__(
        self, slots: Sequence[Tensor], stores: Stores, buffers: Sequence[Tensor], for_experts: Tensor | None
    ) -> None:
        """buffers: for units; for_experts: one for the experts of a unit, if there are any."""
        super().__init__(slots, stores)
        self._for_experts = for_experts
        self._copied: torch.cuda.Event | None = None  # the last copy from `for_experts`
        self._coming: list[Future[torch.cuda.Event] | None] = [None] * len(slots)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        assert stores.in_file, "without a file ToDevice does it"
        self._ahead = _Ahead(stores, buffers)
        self._thread = threading.Thread(target=self._work, name="outpace-stream", daemon=True)
        self._thread.start()

    def load(self, unit: int, slot: int, experts: Sequence[int], kept: Mapping[int, Tensor]) -> None:
        coming: Future[torch.cuda.Event] = Future()
        self._coming[slot] = coming
        self._orders.put(_Order(unit, slot, experts, kept, now(), coming))

    def arrive(self, slot: int) -> None:
        coming, self._coming[slot] = self._coming[slot], None
        if coming is not None:
            torch.cuda.current_stream().wait_event(coming.result())

    def bring(self, unit: int, slot: int, kept: Mapping[int, Tensor], missing: Sequence[int]) -> None:
        stores, buffer = self._stores, None
        if unit not in stores.memory:
            buffer = self._for_experts
            assert buffer is not None, "there are experts in the file"
            if self._copied is not None:
                self._copied.synchronize()
            stores.read_experts(unit, missing, buffer).wait()
        self._copied = self._bring(unit, slot, {**kept, **stores.pieces(unit, missing, buffer)})

    def forget(self) -> None:
        for coming in self._coming:
            if coming is not None:
                coming.exception()  # waits
        self._coming = [None] * len(self._slots)
        self._copies.synchronize()

    def close(self) -> None:
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
        stored = self._stores.memory.get(order.unit)
        buffer = self._ahead.take(order.unit, order.experts) if stored is None else stored
        with self._after(order.free) as there:
            self._fill(order.unit, order.slot, buffer, order.experts, order.kept)
        if stored is None:
            there.synchronize()  # the link is at least twice as fast as the file, and the buffer is reused at once
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
    """Reads units of a file into buffers, in the order in which steps need them."""

    def __init__(self, stores: Stores, buffers: Sequence[Tensor]) -> None:
        self._stores, self._free = stores, list(buffers)
        self._units = sorted(stores.in_file or ())
        self._under_way: deque[tuple[int, Sequence[int], Tensor, Reads]] = deque()
        self._next = 0
        self._all = False  # whether steps need all experts, except those cached on the device
        self._experts: dict[int, Sequence[int]] = {}  # unit -> the experts it needed last time

    def take(self, unit: int, experts: Sequence[int]) -> Tensor:
        """Wait for the buffer with this unit and these experts; the following units are read ahead."""
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
            reading.settle()  # steps skipped this unit
            self._free.append(buffer)
        reading.add(self._stores.read_experts(unit, sorted(set(experts).difference(there)), buffer))
        try:
            self._wait(reading, unit, buffer, experts)
        except BaseException:
            self._free.append(buffer)
            raise
        return buffer

    def _wait(self, reading: Reads, unit: int, buffer: Tensor, experts: Sequence[int]) -> None:
        """Wait for a read; if it failed, retry once, since it may have been started long ago."""
        try:
            reading.wait()
        except OffloadError:
            self._stores.read(unit, experts, buffer).wait()

    def give_back(self, buffer: Tensor) -> None:
        """Reuse a buffer that has been copied for the next unit."""
        self._free.append(buffer)
        self._read_on()

    def forget(self) -> None:
        """Wait for all reads, and drop their results."""
        while self._under_way:
            _, _, buffer, reading = self._under_way.popleft()
            reading.settle()
            self._free.append(buffer)

    def _read_on(self) -> None:
        while self._free and len(self._under_way) < len(self._units):
            unit, buffer = self._units[self._next], self._free.pop()
            every = range(self._stores.forms[unit].experts)
            experts = (self._experts.get(unit) or every) if self._all else ()
            self._under_way.append((unit, experts, buffer, self._stores.read(unit, experts, buffer)))
            self._next = (self._next + 1) % len(self._units)
