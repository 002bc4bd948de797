"""Streams the layers of one model: moves them to host memory or disk while it is loaded, then fetches them to run."""

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.heap import give_memory_back
from outpace.inject.quantized import PackedExperts, PackedLinear
from outpace.inject.recipe import Recipe
from outpace.log import chosen, logger, size_text
from outpace.offload.experts import Counts, Kept, shares
from outpace.offload.place import Placement
from outpace.offload.prefetch import Ring, attach
from outpace.offload.store_memory import aligned
from outpace.offload.store_read import ReadOptions, UnitFile
from outpace.offload.store_write import UnitWriter
from outpace.offload.units import Form, Unit, layer_of
from outpace.offload.ways import Stores, ToDevice, ToHost, Way
from outpace.offload.ways_file import ToDeviceFromFile


@dataclass(frozen=True)
class Folder:
    """Where layers on disk are stored."""

    path: Path
    key: str | None
    """Identifies these weights among all others; None: unknown, so their file is temporary."""
    reads: ReadOptions
    buffers: int
    """Number of host buffers for layers that are read for a GPU."""


class Streaming:
    """The streamed units of a model, in the order of its layers."""

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        forms: Sequence[Form],
        placement: Placement,
        device: torch.device,
        *,
        pinned: bool,
        folder: Folder | None = None,
        stay: frozenset[Recipe] = frozenset(),
        for_experts: int = 0,
    ) -> None:
        """layers: all layers, with paths; forms: their layouts as units; stay: weights that are not streamed.

        for_experts: device bytes for the cache of experts.
        """
        self.placement, self.device = placement, device
        self._last, self._pinned, self._folder, self._stay = layers[-1][1], pinned, folder, stay
        streamed = [number for number, tier in enumerate(placement.tiers) if tier != "device"]
        self.units = [Unit(*layers[number], forms[number]) for number in streamed]
        """The streamed layers."""
        self._largest = max(unit.form.nbytes for unit in self.units)
        self._divided = [index for index, unit in enumerate(self.units) if unit.form.experts]
        self._pieces = shares([self.units[index].form for index in self._divided], for_experts)
        on_disk = [index for index, number in enumerate(streamed) if placement.tiers[number] == "disk"]
        starts = accumulate((len(self.units[index].form.parts) for index in on_disk), initial=0)
        self._in_file = dict(zip(on_disk, starts, strict=False))
        self._memory: dict[int, Tensor] = {}
        index_of = {number: index for index, number in enumerate(streamed)}
        owners = layer_of([layer for _, layer in layers])
        self._of = {module: index_of[number] for module, number in owners.items() if number in index_of}
        self._ring: Ring | None = None
        self._file, self._layouts = self._find_file()
        self._writer: UnitWriter | None = None
        self.close: Callable[[], Any] = lambda: None
        """Releases threads and files; so does garbage collection of the layers."""

    @property
    def capturable(self) -> bool:
        return not self._in_file and not self._divided and self._pinned

    @property
    def counts(self) -> Counts:
        return Counts() if self._ring is None else self._ring.counts

    def index_of(self, recipe: Recipe, modules: Iterable[nn.Module]) -> int | None:
        """The unit that a weight belongs to, by the modules that own it; None: it stays on the device."""
        if recipe in self._stay:
            return None
        found = {self._of.get(id(module)) for module in modules}
        return found.pop() if len(found) == 1 else None

    def is_there(self, index: int) -> bool:
        """Whether a unit is in an existing file, so that it need not be loaded."""
        return self._file is not None and index in self._in_file

    def find(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        """Register the parameters, without values, of a unit that is in an existing file."""
        self.units[index].held_as(parameters, self._layouts[list(self._in_file).index(index)])

    def keep(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        """Move the filled parameters of a unit from the device to host memory or the file."""
        unit = self.units[index]
        for module in unit.layer.modules():
            if isinstance(module, PackedLinear | PackedExperts):
                module.arrange()
        unit.lay_out(parameters)
        if index not in self._in_file:
            self._memory[index] = aligned(unit.form.nbytes, pinned=self._pinned)
            unit.pack(self._memory[index])
            return
        self._writer = self._writer or self._new_file()
        whole = aligned(unit.form.nbytes)
        unit.pack(whole)
        if self._writer.found is None:  # otherwise another process has written the same file
            for number, part in enumerate(unit.form.parts, self._in_file[index]):
                self._writer.put(number, whole[part])
        if self.device.type == "cpu":
            give_memory_back()  # return the layer's memory, since the next layer may not fit into the hole

    def start(self) -> None:
        """All units are stored: from now on layers are fetched when they run."""
        if self._writer is not None:
            layouts = [self.units[index].layout() for index in self._in_file]
            self._file = self._writer.finish(note=json.dumps(layouts))
        slots = [self._on_device(self._largest) for _ in range(self.placement.slots)]
        kept = {index: self._kept(index, pieces) for index, pieces in zip(self._divided, self._pieces, strict=True)}
        forms = [unit.form for unit in self.units]
        way = self._way(slots, Stores(forms, self._memory, self._file, self._in_file))
        self._ring = Ring(self.units, slots, way, kept)
        self._ring.restore()
        attach(self._ring, self.units, self._last)
        self.close = weakref.finalize(
            self._last, _end, way, self._ring.counts
        )  # of the last layer: a model over pages holds only layers
        chosen("layers", self, "by the memory budgets")
        if self._divided:
            held = f"{sum(self._pieces)} cached on {self.device} ({size_text(self.tier_bytes()['experts'])})"
            chosen(
                "experts of streamed layers", f"fetched when needed, {held}", "no graphs: the host reads each choice"
            )

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.__exit__()
        if self._file is not None:
            self._file.close()

    def restore(self) -> None:
        """Load the first layers into their slots, as each step expects: the last step may have failed half-way."""
        if self._ring is not None:
            self._ring.restore()

    def tier_bytes(self) -> dict[str, int]:
        """Bytes of the slots, the cache of experts, and the streamed layers in host memory and on disk."""
        sizes = [unit.form.nbytes for unit in self.units]
        host = sum(size for index, size in enumerate(sizes) if index not in self._in_file)
        kept = zip(self._divided, self._pieces, strict=True)
        experts = sum(number * self.units[index].form.piece for index, number in kept)
        slots = self.placement.slots * self._largest
        return {"slots": slots, "experts": experts, "host": host, "disk": sum(sizes) - host}

    def __str__(self) -> str:
        tiers, held = self.placement.tiers, self.tier_bytes()
        parts = [f"{tiers.count('device')} on {self.device}"]
        if held["host"]:
            parts.append(f"{tiers.count('host')} in host memory ({size_text(held['host'])})")
        if self._folder is not None and held["disk"]:
            parts.append(f"{tiers.count('disk')} in {self._folder.path} ({size_text(held['disk'])})")
        return f"{', '.join(parts)}; {self.placement.slots} slots of {size_text(self._largest)}"

    def _way(self, slots: list[Tensor], stores: Stores) -> Way:
        if self.device.type == "cpu":
            return ToHost(slots, stores)
        if not self._in_file:
            return ToDevice(slots, stores)
        assert self._folder is not None, "there is a file"
        buffers = [aligned(self._largest, pinned=True) for _ in range(max(2, self._folder.buffers))]
        for_experts = buffers.pop() if self._divided else None
        return ToDeviceFromFile(slots, stores, buffers, for_experts)

    def _kept(self, index: int, pieces: int) -> Kept:
        piece = self.units[index].form.piece
        return Kept(self._on_device(pieces * piece).split(piece) if pieces else ())

    def _on_device(self, size: int) -> Tensor:
        if self.device.type == "cpu":
            return aligned(size)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _file_sizes(self) -> list[int]:
        units = (self.units[index] for index in self._in_file)
        return [part.stop - part.start for unit in units for part in unit.form.parts]

    def _find_file(self) -> tuple[UnitFile | None, list[Any]]:
        """The file that an earlier start wrote, and the layouts of its units."""
        if not self._in_file or self._folder is None or self._folder.key is None:
            return None, []
        file = UnitFile.find(self._folder.path, self._folder.key, self._file_sizes(), options=self._folder.reads)
        if file is None:
            return None, []
        chosen("layers on disk", file.path, "an earlier start stored the same weights there")
        return file, json.loads(file.note)

    def _new_file(self) -> UnitWriter:
        assert self._folder is not None, "layers on disk have a folder"
        folder = self._folder
        key, temporary = folder.key or type(self).__name__, folder.key is None
        return UnitWriter(folder.path, key, self._file_sizes(), temporary=temporary, options=folder.reads).__enter__()


def _end(way: Way, counts: Counts) -> None:
    logger.debug("offload: %s", counts)
    way.close()
