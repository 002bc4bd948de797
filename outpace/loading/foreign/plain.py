"""Quantized weights of a checkpoint as plain ones: each is made of its stored tensors when it is wanted."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.errors import as_field
from outpace.loading.dtypes import short
from outpace.loading.foreign.format import Format, Parts
from outpace.loading.foreign.method import Method, read_method
from outpace.loading.read_source import read
from outpace.loading.regions import cut
from outpace.loading.weights import Piece, Source, Weights, stored_bytes
from outpace.log import chosen, size_text

_OF_ACTIVATIONS = re.compile(
    r"\.((input|output|activation)_(scale|zero_point|scale_ub)|(kv?|[qv])_(scale|zero_point))$"
)


@dataclass(frozen=True)
class _Quantized:
    """A quantized weight, or a stack of experts: its tensors by the endings of their names."""

    stem: str
    layout: Format
    sources: Mapping[str, Source]

    @property
    def experts(self) -> int | None:
        """None: it is a single weight."""
        shape = self.sources[self.layout.endings[0]].shape
        return shape[0] if len(shape) == self.layout.dims + 1 else None

    def plain(self, dtype: torch.dtype) -> Source:
        """The weight without quantization. Its tensors are checked now, and read when it is wanted."""
        swap = (0, 1) if self.layout.transposed else None
        shape = self.layout.shape(self.parts(0, values=False))
        full = (shape[1], shape[0]) if swap else shape
        experts = self.experts
        if experts is None:
            return Source(full, dtype, (Piece(partial(self.make, 0, dtype), shape, dtype, swap=swap),))
        pieces = (Piece(partial(self.make, e, dtype), shape, dtype, swap=swap, into=(e,)) for e in range(experts))
        return Source((experts, *full), dtype, tuple(pieces))

    def make(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The weight, or one of the stack, from its stored tensors."""
        return self.layout.dequantized(self.parts(expert, values=True), dtype)

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
        found = {weight.stem + weight.layout.makes: weight for weight in _quantized(weights.sources, method)}
        plain = {name: weight.plain(dtype) for name, weight in found.items()}
    if not found:
        return weights
    used = {weight.stem + ending for weight in found.values() for ending in weight.sources}
    rest = {name: source for name, source in weights.sources.items() if name not in used}
    unused = {name for name in rest if name not in wanted and _of_no_use(name, rest[name], found)}
    _log(found, plain, dtype, method)
    return replace(weights, sources={name: rest[name] for name in rest if name not in unused} | plain)


def _quantized(sources: Mapping[str, Source], method: Method) -> Iterator[_Quantized]:
    for name, source in sources.items():
        if (weight := method.find(name, source.dtype)) is not None:
            stem, layout = weight
            parts = {ending: sources[stem + ending] for ending in layout.endings if stem + ending in sources}
            yield _Quantized(stem, layout, parts)


def _of_no_use(name: str, source: Source, found: Collection[str]) -> bool:
    """Scales of activations and the cache, and the biases of zeros that GPTQ gives to layers without a bias."""
    if _OF_ACTIVATIONS.search(name):
        return True
    layer, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{layer}.weight" in found and not bool(read(source).any())


def _log(found: Mapping[str, _Quantized], plain: Mapping[str, Source], dtype: torch.dtype, method: Method) -> None:
    for label in sorted({weight.layout.label for weight in found.values()}):
        names = [name for name, weight in found.items() if weight.layout.label == label]
        stored = sum(stored_bytes(found[name].sources) for name in names)
        memory = size_text(stored_bytes({name: plain[name] for name in names}))
        chosen(label, f"converted to {short(dtype)} while loading", f"{size_text(stored)} stored, {memory} in memory")
    if method.activations is not None:
        chosen("activations", f"not quantized, although the checkpoint has {method.activations}", "this is more exact")


def _empty(source: Source) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")
