"""Quantizes and writes single tensors of a checkpoint, block by block."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.safetensors_file import SafetensorsWriter
from outpace.loading.weights import Source
from outpace.loading.write_shards import blocks
from outpace.quant.compressed import bits, form, stored
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.scheme import Scheme

BLOCK_BYTES = 16 * 2**20
"""Bytes of a weight that are quantized at once; they take several times that much memory."""
ROWS = 8  # rows whose zero points share an int32
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of a checkpoint, and how it is written."""

    name: str
    source: Source
    dtype: torch.dtype
    """dtype in which it is written, if it is not quantized."""
    scheme: Scheme | None = None

    @property
    def specs(self) -> Specs:
        """Name of a written tensor -> dtype and shape."""
        if self.scheme is None:
            return {self.name: (self.dtype, self.source.shape)}
        rows, columns = self.source.shape
        prefix = self.name.removesuffix("weight")
        return {prefix + end: spec for end, spec in form((rows, columns), self.scheme).items()}

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.specs.values())


def specs_of(items: Sequence[Item]) -> Specs:
    return {name: spec for item in items for name, spec in item.specs.items()}


def write_item(writer: SafetensorsWriter, item: Item, errors: dict[str, float]) -> Iterator[int]:
    """Write an item block by block; yields the bytes of each block."""
    if item.scheme is None:
        row = math.prod(item.source.shape[1:])
        for first, block in blocks(item.source):
            yield writer.write(item.name, block.to(item.dtype), first * row)
        return
    prefix, specs = item.name.removesuffix("weight"), item.specs
    if (shape := f"{prefix}weight_shape") in specs:
        yield writer.write(shape, torch.tensor(item.source.shape))
    lost = whole = 0.0
    for first, block in blocks(item.source, BLOCK_BYTES, ROWS):
        made = quantized(block, item.scheme)
        change, norm = change_of(block, made, item.scheme)
        lost, whole = lost + change, whole + norm
        for end, tensor in stored(made, item.scheme).items():
            width = specs[prefix + end][1][1]
            together = 32 // bits(item.scheme) if end == "weight_zero_point" else 1
            yield writer.write(prefix + end, tensor, first // together * width)
    if not math.isfinite(lost + whole):
        raise ModelError(f"model: {item.name} holds NaN or infinity, which cannot be quantized; use --exclude for it")
    errors[item.name] = math.sqrt(lost / whole) if whole else 0.0


def change_of(block: Tensor, made: Mapping[str, Tensor], scheme: Scheme) -> tuple[float, float]:
    """(squared norm of the rounding error, squared norm of the block)."""
    rows, columns = block.shape
    exact = block.float()
    found = as_packed(made, scheme, (rows, columns)).dequantized(torch.float32)
    return float((found - exact).square_().sum(dtype=torch.float64)), float(exact.square().sum(dtype=torch.float64))
