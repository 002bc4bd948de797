"""Writes the files of quantized safetensors in the order in which calibration quantizes the weights."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.calibrate import Give
from outpace.loading.safetensors_file import SafetensorsWriter
from outpace.loading.write_items import Item, change_of, specs_of, write_item
from outpace.quant.compressed import stored

Run = Callable[[Give], Mapping[str, Tensor]]
"""Quantizes weights, passes each on by name, and returns other tensors that changed."""


def write_calibrated(
    folder: Path, files: Mapping[str, list[Item]], run: Run, progress: Callable[[int], None]
) -> dict[str, float]:
    """Write all files of a folder while `run` quantizes the weights; returns the error of each quantized weight."""
    with ExitStack() as stack:
        made = _Files(folder, files, stack, progress)
        made.write_rest(run(made.give))
    return made.errors


class _Files:
    """The open files of the folder."""

    def __init__(
        self, folder: Path, files: Mapping[str, list[Item]], stack: ExitStack, progress: Callable[[int], None]
    ) -> None:
        self._places: dict[str, tuple[Item, SafetensorsWriter]] = {}
        for file, items in files.items():
            writer = stack.enter_context(SafetensorsWriter(folder / file, specs_of(items), {}))
            self._places.update({item.name: (item, writer) for item in items})
        self._progress, self._count = progress, 0
        self.errors: dict[str, float] = {}
        """Errors of quantized weights (see `WrittenQuantized`)."""

    def give(self, name: str, weight: Tensor, made: Mapping[str, Tensor]) -> None:
        """Write a weight that calibration has quantized."""
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
        """Write all tensors that calibration did not pass on."""
        for name, (item, writer) in self._places.items():
            if name in changed:
                self._advance(writer.write(name, changed[name].to(item.dtype)))
            elif name not in self.errors:
                for nbytes in write_item(writer, item, self.errors):
                    self._advance(nbytes)

    def _advance(self, nbytes: int) -> None:
        self._count += nbytes
        self._progress(self._count)
