"""Replaces the quantized weights of a checkpoint by sources that convert them when they are read."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.errors import as_field
from outpace.kernels.packed import Packed
from outpace.loading.foreign.format import Format, PackedFormat, Parts
from outpace.loading.foreign.method import Method, read_method
from outpace.loading.read_source import read
from outpace.loading.regions import cut
from outpace.loading.stored import StoredWeight
from outpace.loading.weights import Piece, Source, Weights, stored_bytes
from outpace.quant.scheme import Scheme
from outpace.quant.stored import scheme_of

_OF_ACTIVATIONS = re.compile(
    r"\.((input|output|activation)_(scale|zero_point|scale_ub)|(kv?|[qv])_(scale|zero_point))$"
)


@dataclass(frozen=True, eq=False)
class _Quantized(StoredWeight):
    """A quantized weight, or one expert of a stack."""

    stem: str
    layout: Format
    sources: Mapping[str, Source]
    """Of a stack: the tensors of all experts."""
    dtype: torch.dtype
    """dtype after conversion."""
    note: str | None = None
    expert: int = 0

    @property
    def label(self) -> str:
        return self.layout.label

    @property
    def peeks(self) -> tuple[str, ...]:
        return self.layout.peeks

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.sources) // (self.experts or 1)

    @property
    def experts(self) -> int | None:
        """Number of experts in a stack; None: a single weight."""
        shape = self.sources[self.layout.endings[0]].shape
        return shape[0] if len(shape) == self.layout.dims + 1 else None

    def plain(self) -> Source:
        """The source of the converted weight. Its tensors are checked now, and read later."""
        swap = (0, 1) if self.layout.transposed else None
        shape = self.layout.shape(self.parts(0, values=False))
        full = (shape[1], shape[0]) if swap else shape
        experts = self.experts
        if experts is None:
            return Source(full, self.dtype, (Piece(self, shape, self.dtype, swap=swap),))
        each = (replace(self, expert=number) for number in range(experts))
        pieces = (Piece(one, shape, self.dtype, swap=swap, into=(one.expert,)) for one in each)
        return Source((experts, *full), self.dtype, tuple(pieces))

    def __call__(self) -> Tensor:
        parts = self.parts(self.expert, values=True)
        for ending, tensor in parts.tensors.items():
            if tensor.dtype.itemsize > 1 and tensor.is_floating_point() and not tensor.isfinite().all():
                raise parts.error(f"{ending.lstrip('._')} holds NaN or infinity")
        return self.layout.dequantized(parts, self.dtype)

    def scheme(self, dtype: torch.dtype) -> Scheme | str:
        if not isinstance(self.layout, PackedFormat):
            return "no scheme supports such numbers"
        weight = self.layout.packed(self.parts(0, values=False))
        if weight.columns is not None:
            return "its columns are not in the order of their groups (act-order)"
        return scheme_of(weight.packed, self.layout.activations) or "its groups have too few columns"

    def packed(self, tensors: Mapping[str, Tensor], scales: torch.dtype) -> Packed:
        assert isinstance(self.layout, PackedFormat), "it has a scheme"
        return self.layout.packed(Parts(self.stem, tensors)).packed

    def parts(self, expert: int, *, values: bool) -> Parts:
        """The stored tensors of one weight; on the meta device without `values`."""
        stem = self.stem if self.experts is None else f"{self.stem} (expert {expert})"
        found = self.sources if self.experts is None else self._of_expert(expert)
        tensors = {
            ending: read(source) if values or ending in self.layout.peeks else source.empty()
            for ending, source in found.items()
        }
        if self.experts is not None:
            tensors = {ending: tensor[0] for ending, tensor in tensors.items()}
        return Parts(stem, tensors)

    def _of_expert(self, expert: int) -> Mapping[str, Source]:
        for ending, source in self.sources.items():
            if source.shape[:1] != (self.experts,):
                shape = list(source.shape)
                raise Parts(self.stem, {}).error(
                    f"{ending} has the shape {shape}, but there are {self.experts} experts"
                )
        return {ending: cut(source, 0, expert, expert + 1) for ending, source in self.sources.items()}


def plain_weights(
    weights: Weights, settings: Mapping[str, Any], wanted: Collection[str], dtype: torch.dtype
) -> Weights:
    """The checkpoint with converted weights of `dtype` instead of the quantized ones that its config describes.

    wanted: names of the model's tensors. Tensors that do not fit their format are an error; no weights are read.
    """
    with as_field(f"model: {weights.origin}", known_as="model"):
        method = read_method(settings)
        every = _quantized(weights.sources, method, dtype)
        found = {weight.stem + weight.layout.makes: weight for weight in every}
        plain = {name: weight.plain() for name, weight in found.items()}
    if not found:
        return weights
    used = {weight.stem + ending for weight in found.values() for ending in weight.sources}
    rest = {name: source for name, source in weights.sources.items() if name not in used}
    unused = {name for name in rest if name not in wanted and _of_no_use(name, rest[name], found)}
    return replace(weights, sources={name: rest[name] for name in rest if name not in unused} | plain)


def _quantized(sources: Mapping[str, Source], method: Method, dtype: torch.dtype) -> Iterator[_Quantized]:
    for name, source in sources.items():
        if (weight := method.find(name, source.dtype)) is not None:
            stem, layout = weight
            parts = {ending: sources[stem + ending] for ending in layout.endings if stem + ending in sources}
            yield _Quantized(stem, layout, parts, dtype, method.note)


def _of_no_use(name: str, source: Source, found: Collection[str]) -> bool:
    """Whether it is a scale of activations or cache, or a zero bias that GPTQ adds to layers without bias."""
    if _OF_ACTIVATIONS.search(name):
        return True
    layer, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{layer}.weight" in found and not bool(read(source).any())
