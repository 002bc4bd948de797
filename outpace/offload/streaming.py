"""The layers of one model that do not stay on the device: put away one by one while it is loaded, then streamed."""

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import OffloadError
from outpace.inject.quantized import PackedExperts, PackedLinear
from outpace.inject.recipe import Recipe
from outpace.log import chosen, size_text
from outpace.offload.place import Placement
from outpace.offload.prefetch import Ring, attach
from outpace.offload.store import ReadOptions, UnitFile, UnitWriter, aligned
from outpace.offload.units import Unit
from outpace.offload.ways import Stores, ToDevice, ToDeviceFromFile, ToHost, Way


@dataclass(frozen=True)
class Folder:
    """Where layers on disk are."""

    path: Path
    key: str | None
    """What tells these weights from all others; None: nothing does, and their file does not outlive the model."""
    reads: ReadOptions
    buffers: int
    """Layers in host memory on their way to a GPU."""


class Streaming:
    """Units of a model, in the order of its layers."""

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        sizes: Sequence[int],
        placement: Placement,
        device: torch.device,
        *,
        pinned: bool,
        folder: Folder | None = None,
        stay: frozenset[Recipe] = frozenset(),
    ) -> None:
        """layers: all of them, by path; sizes: what each takes as a unit; stay: weights that layers leave behind."""
        self.placement, self.device = placement, device
        self._last, self._pinned, self._folder, self._stay = layers[-1][1], pinned, folder, stay
        streamed = [number for number, tier in enumerate(placement.tiers) if tier != "device"]
        self.units = [Unit(*layers[number], number) for number in streamed]
        """Those that are streamed."""
        self._sizes = [sizes[number] for number in streamed]
        on_disk = [index for index, number in enumerate(streamed) if placement.tiers[number] == "disk"]
        self._in_file = {index: place for place, index in enumerate(on_disk)}
        self._memory: dict[int, Tensor] = {}
        self._of = {id(module): index for index, unit in enumerate(self.units) for module in unit.layer.modules()}
        self._ring: Ring | None = None
        self._file, self._layouts = self._find_file()
        self._writer: UnitWriter | None = None
        self.close: Callable[[], Any] = lambda: None
        """Lets go of threads and files; so does the end of the model."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step."""
        return not self._in_file and self._pinned

    @property
    def num_loads(self) -> int:
        """Units that have been fetched so far."""
        return 0 if self._ring is None else self._ring.num_loads

    def index_of(self, recipe: Recipe, modules: Iterable[nn.Module]) -> int | None:
        """The unit that a weight goes away with, by the modules that have it; None: it stays."""
        if recipe in self._stay:
            return None
        found = {self._of.get(id(module)) for module in modules}
        return found.pop() if len(found) == 1 else None

    def is_there(self, index: int) -> bool:
        """Whether a unit is in the file already, and need not be loaded."""
        return self._file is not None and index in self._in_file

    def find(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        """These are the parameters of a unit that is in the file already; they have no values."""
        self.units[index].held_as(parameters, self._layouts[self._in_file[index]])

    def keep(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        """These are the parameters of a unit, filled, on the device: put them away."""
        unit = self.units[index]
        for module in unit.layer.modules():
            if isinstance(module, PackedLinear | PackedExperts):
                module.arrange()
        unit.lay_out(parameters)
        if unit.nbytes != self._sizes[index]:
            raise OffloadError(
                f"offload: {unit.path} takes {unit.nbytes} bytes, and {self._sizes[index]} were expected"
            )
        if index not in self._in_file:
            self._memory[index] = aligned(unit.nbytes, pinned=self._pinned)
            unit.pack(self._memory[index])
            return
        self._writer = self._writer or self._new_file()
        whole = aligned(unit.nbytes)
        unit.pack(whole)
        if self._writer.found is None:  # else another process has written the same by now
            self._writer.put(self._in_file[index], whole)

    def start(self, model: nn.Module) -> None:
        """Everything is put away: from now on layers are fetched when they run."""
        if self._writer is not None:
            layouts = [self.units[index].layout() for index in self._in_file]
            self._file = self._writer.finish(note=json.dumps(layouts))
        largest = max(self._sizes)
        slots = [self._slot(largest) for _ in range(self.placement.slots)]
        way = self._way(slots, Stores(self._memory, self._file, self._in_file))
        self._ring = Ring(self.units, slots, way)
        self._ring.restore()
        attach(self._ring, self.units, self._last)
        self.close = weakref.finalize(model, way.close)
        chosen("layers", self, "what the budgets leave")

    def abandon(self) -> None:
        """Loading has failed: leave nothing behind."""
        if self._writer is not None:
            self._writer.__exit__()
        if self._file is not None:
            self._file.close()

    def restore(self) -> None:
        """Put the first layers in their slots, as every step finds them: a step may have failed half-way."""
        if self._ring is not None:
            self._ring.restore()

    def tier_bytes(self) -> dict[str, int]:
        """Bytes of the slots, and of streamed layers by where they live."""
        host = sum(size for index, size in enumerate(self._sizes) if index not in self._in_file)
        return {"slots": self.placement.slots * max(self._sizes), "host": host, "disk": sum(self._sizes) - host}

    def __str__(self) -> str:
        tiers, held = self.placement.tiers, self.tier_bytes()
        parts = [f"{tiers.count('device')} on {self.device}"]
        if held["host"]:
            parts.append(f"{tiers.count('host')} in host memory ({size_text(held['host'])})")
        if self._folder is not None and held["disk"]:
            parts.append(f"{tiers.count('disk')} in {self._folder.path} ({size_text(held['disk'])})")
        return f"{', '.join(parts)}; {self.placement.slots} slots of {size_text(max(self._sizes))}"

    def _way(self, slots: list[Tensor], stores: Stores) -> Way:
        if self.device.type == "cpu":
            return ToHost(slots, stores)
        if not self._in_file:
            return ToDevice(slots, stores)
        assert self._folder is not None, "there is a file"
        buffers = [aligned(max(self._sizes), pinned=True) for _ in range(max(2, self._folder.buffers))]
        return ToDeviceFromFile(slots, stores, buffers)

    def _slot(self, size: int) -> Tensor:
        if self.device.type == "cpu":
            return aligned(size)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _file_sizes(self) -> list[int]:
        return [self._sizes[index] for index in self._in_file]

    def _find_file(self) -> tuple[UnitFile | None, list[Any]]:
        """The file that another start has left, and what lies where in it."""
        if not self._in_file or self._folder is None or self._folder.key is None:
            return None, []
        file = UnitFile.find(self._folder.path, self._folder.key, self._file_sizes(), options=self._folder.reads)
        if file is None:
            return None, []
        chosen("layers on disk", file.path, "the same weights were put there by another start")
        return file, json.loads(file.note)

    def _new_file(self) -> UnitWriter:
        assert self._folder is not None, "layers on disk have a folder"
        folder = self._folder
        key, temporary = folder.key or type(self).__name__, folder.key is None
        return UnitWriter(folder.path, key, self._file_sizes(), temporary=temporary, options=folder.reads).__enter__()
