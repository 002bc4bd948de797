"""Quantized weights of a checkpoint as sources: each is made of its stored tensors when it is wanted."""

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
    """A quantized weight, or one of a stack of experts."""

    stem: str
    layout: Format
    sources: Mapping[str, Source]
    """Of a stack those of all experts."""
    dtype: torch.dtype
    """What it is converted to."""
    words: str | None = None
    expert: int = 0

    @property
    def label(self) -> str:
        """See `StoredWeight`."""
        return self.layout.label

    @property
    def peeks(self) -> tuple[str, ...]:
        """See `StoredWeight`."""
        return self.layout.peeks

    @property
    def told(self) -> str | None:
        """See `StoredWeight`."""
        return self.words

    @property
    def nbytes(self) -> int:
        """See `StoredWeight`."""
        return stored_bytes(self.sources) // (self.experts or 1)

    @property
    def experts(self) -> int | None:
        """None: it is a single weight."""
        shape = self.sources[self.layout.endings[0]].shape
        return shape[0] if len(shape) == self.layout.dims + 1 else None

    def plain(self) -> Source:
        """The weight without quantization. Its tensors are checked now, and read when it is wanted."""
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
        """See `StoredWeight`."""
        parts = self.parts(self.expert, values=True)
        for ending, tensor in parts.tensors.items():
            if tensor.dtype.itemsize > 1 and tensor.is_floating_point() and not tensor.isfinite().all():
                raise parts.error(f"{ending.lstrip('._')} holds NaN or infinity")
        return self.layout.dequantized(parts, self.dtype)

    def scheme(self, dtype: torch.dtype) -> Scheme | str:
        """See `StoredWeight`."""
        if not isinstance(self.layout, PackedFormat):
            return "no scheme has such numbers"
        weight = self.layout.packed(self.parts(0, values=False))
        if weight.columns is not None:
            return "its columns are not in the order of their groups (act-order)"
        return scheme_of(weight.packed, self.layout.activations) or "its groups have too few columns"

    def packed(self, tensors: Mapping[str, Tensor], scales: torch.dtype) -> Packed:
        """See `StoredWeight`."""
        assert isinstance(self.layout, PackedFormat), "it has a scheme"
        return self.layout.packed(Parts(self.stem, tensors)).packed

    def parts(self, expert: int, *, values: bool) -> Parts:
        """The stored tensors of one weight; without values they are on the meta device."""
        stem = self.stem if self.experts is None else f"{self.stem} (expert {expert})"
        found = self.sources if self.experts is None else self._of_expert(expert)
        tensors = {
            ending: read(source) if values or ending in self.layout.peeks else _empty(source)
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
    """The checkpoint with plain weights of `dtype` in place of the quantized ones that its config describes.

    wanted: the names of the model's tensors. What does not fit its format is an error; no weight is read.
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
            yield _Quantized(stem, layout, parts, dtype, method.activations)


def _of_no_use(name: str, source: Source, found: Collection[str]) -> bool:
    """Scales of activations and the cache, and the biases of zeros that GPTQ gives to layers without a bias."""
    if _OF_ACTIVATIONS.search(name):
        return True
    layer, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{layer}.weight" in found and not bool(read(source).any())


def _empty(source: Source) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")
