"""What a weight is kept as, and what it is multiplied with."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

Values = Literal["int8", "int4", "fp8"]
Activations = Literal["int8", "fp8"]

DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
"""Of the values as they lie in memory: two of 4 bits share a byte."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A form of a weight [N, K]. A weight without one stays in the model's dtype."""

    values: Values
    group: int | None = None
    """Columns of a row that share a scale; None: all of them."""
    per_tensor: bool = False
    """One scale for the whole weight."""
    symmetric: bool = True
    """No zero points."""
    activations: Activations | None = None
    """What rows are quantized to before they are multiplied, one by one; None: they are multiplied as they are."""
    scales: torch.dtype | None = None
    """What scales are kept in; None: float16 of groups, else float32."""
    sources: tuple[int, ...] = ()
    """Rows of each of several tensors that the weight is made of, which have a scale each if it is per tensor."""
    block_rows: int = 1
    """Rows that share a scale."""
    stored: bool = False
    """Its values, scales and zeros are those of the checkpoint: they are put in place, and nothing is rounded."""

    def __str__(self) -> str:
        scales = "per channel" if self.group is None else f"in groups of {self.group}"
        scales = "per tensor" if self.per_tensor else scales
        scales = scales if self.block_rows == 1 else f"in blocks of {self.block_rows} x {self.group or 'all'}"
        activations = "" if self.activations is None else f", activations {self.activations}"
        stored = ", as stored" if self.stored else ""
        return f"{self.values} {scales}{'' if self.symmetric else ', asymmetric'}{activations}{stored}"

    @property
    def kept(self) -> torch.dtype:
        """The dtype of scales and zeros."""
        return self.scales or (torch.float32 if self.group is None else torch.float16)

    def block(self, rows: int) -> int:
        """Rows that share a scale, or whose scales are equal, of a weight with so many."""
        return max(1, math.gcd(*self.sources) if self.sources else rows) if self.per_tensor else self.block_rows

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight [..., N, K] with its scales and zeros."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.tensors(shape).values())

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what a weight [..., N, K] becomes, by what is put behind its name."""
        *stack, rows, columns = shape
        width = -(-columns // 2) if self.values == "int4" else columns
        scales = (*stack, -(-rows // self.block(rows)), 1 if self.group is None else -(-columns // self.group))
        found = {"": ((*stack, rows, width), DTYPES[self.values]), "_scale": (scales, self.kept)}
        return found if self.symmetric else {**found, "_zero": (scales, self.kept)}
