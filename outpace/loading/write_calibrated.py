"""Tensors written as a folder of quantized safetensors in the order in which calibration makes them."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.calibrate import Give
from outpace.loading.out_folder import check_apart, check_out, check_space, out_folder
from outpace.loading.safetensors_write import SafetensorsWriter
from outpace.loading.unchanged import Unchanged
from outpace.loading.write_quantized import (
    QUANTIZED,
    Item,
    WrittenQuantized,
    change_of,
    files_of,
    specs_of,
    write_index,
    write_item,
)
from outpace.loading.write_shards import Progress, place_of
from outpace.quant.compressed import stored

Run = Callable[[Give], Mapping[str, Tensor]]
"""Quantizes weights, gives them by name, and returns others that have changed."""


def write_calibrated(
    items: Collection[Item],
    out: Path,
    *,
    run: Run,
    beside: Callable[[Path], None],
    unchanged: Unchanged,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> WrittenQuantized:
    """Write all items into a new folder `out`, which appears whole or not at all; see `write_quantized`."""
    begin = time.perf_counter()
    out = check_out(out, QUANTIZED, force=force)
    check_apart({item.name: item.source for item in items}, out)
    files = files_of(sorted(items, key=lambda item: place_of(item.source)))
    total = sum(item.nbytes for item in items)
    check_space(out, total)
    with out_folder(out, QUANTIZED, force=force) as folder:
        with ExitStack() as stack:
            made = _Files(folder, files, stack, lambda count: progress(count, total))
            made.write_rest(run(made.give))
        unchanged.check()
        write_index(folder, files)
        beside(folder)
        sizes = {name: (folder / name).stat().st_size for name in files}
    before = sum(size for size, _ in unchanged.seen.values())
    return WrittenQuantized(out, sizes, time.perf_counter() - begin, before, made.errors)


class _Files:
    """All files of a folder, open."""

    def __init__(
        self, folder: Path, files: Mapping[str, list[Item]], stack: ExitStack, progress: Callable[[int], None]
    ) -> None:
        self._places: dict[str, tuple[Item, SafetensorsWriter]] = {}
        for file, items in files.items():
            writer = stack.enter_context(SafetensorsWriter(folder / file, specs_of(items), {}))
            self._places.update({item.name: (item, writer) for item in items})
        self._progress, self._count = progress, 0
        self.errors: dict[str, float] = {}
        """Of each quantized weight (see `WrittenQuantized`)."""

    def give(self, name: str, weight: Tensor, made: Mapping[str, Tensor]) -> None:
        """Write a weight that calibration has made."""
        item, writer = self._places[name]
        assert item.scheme is not None, "it is quantized"
        lost, whole = change_of(weight, made, item.scheme)
        if not math.isfinite(lost + whole):
            raise ModelError(
                f"model: {name}, or what the model computes before it, holds NaN or infinity, which cannot be quantized"
            )
        self.errors[name] = math.sqrt(lost / whole) if whole else 0.0
        prefix = name.removesuffix("weight")
        tensors = stored({end: tensor.cpu() for end, tensor in made.items()}, item.scheme)
        if f"{prefix}weight_shape" in item.specs:
            tensors["weight_shape"] = torch.tensor(item.source.shape)
        self._advance(sum(writer.write(prefix + end, tensor) for end, tensor in tensors.items()))

    def write_rest(self, changed: Mapping[str, Tensor]) -> None:
        """Write what calibration has not given."""
        for name, (item, writer) in self._places.items():
            if name in changed:
                self._advance(writer.write(name, changed[name].to(item.dtype)))
            elif name not in self.errors:
                for nbytes in write_item(writer, item, self.errors):
                    self._advance(nbytes)

    def _advance(self, nbytes: int) -> None:
        self._count += nbytes
        self._progress(self._count)
