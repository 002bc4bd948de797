"""A quantization scheme: how a weight is stored, and how the activations that it multiplies are quantized."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from outpace.kernels.packed import KINDS

Values = Literal["int8", "int4", "fp8"]
Activations = Literal["int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight [N, K] is quantized. A weight without a scheme stays in the model's dtype."""

    values: Values
    group: int | None = None
    """Columns of a row that share a scale; None: the whole row."""
    per_tensor: bool = False
    """One scale for the whole weight."""
    symmetric: bool = True
    """No zero points."""
    activations: Activations | None = None
    """The format of quantized activations, row by row; None: they are not quantized."""
    scales: torch.dtype | None = None
    """dtype of scales and zeros; None: float16 for groups, else float32."""
    sources: tuple[int, ...] = ()
    """Rows of each tensor that the weight is made of; with `per_tensor` each of these tensors has a scale."""
    block_rows: int = 1
    """Rows that share a scale."""
    stored: bool = False
    """Values, scales and zeros come from the checkpoint; nothing is rounded."""

    def __str__(self) -> str:
        scales = "per channel" if self.group is None else f"in groups of {self.group}"
        scales = "per tensor" if self.per_tensor else scales
        scales = scales if self.block_rows == 1 else f"in blocks of {self.block_rows} x {self.group or 'all'}"
        activations = "" if self.activations is None else f", activations {self.activations}"
        stored = ", as stored" if self.stored else ""
        return f"{self.values} {scales}{'' if self.symmetric else ', asymmetric'}{activations}{stored}"

    @property
    def kept(self) -> torch.dtype:
        """dtype of scales and zeros."""
        return self.scales or (torch.float32 if self.group is None else torch.float16)

    def block(self, rows: int) -> int:
        """Rows that share a scale (or have equal scales) in a weight with this number of rows."""
        return max(1, math.gcd(*self.sources) if self.sources else rows) if self.per_tensor else self.block_rows

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight [..., N, K] with its scales and zeros."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.tensors(shape).values())

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of a quantized weight [..., N, K]: suffix of the name -> shape and dtype."""
        *stack, rows, columns = shape
        width = -(-columns // 2) if self.values == "int4" else columns
        scales = (*stack, -(-rows // self.block(rows)), 1 if self.group is None else -(-columns // self.group))
        found = {"": ((*stack, rows, width), KINDS[self.values]), "_scale": (scales, self.kept)}
        return found if self.symmetric else {**found, "_zero": (scales, self.kept)}
