"""Help for tests of checkpoints: tiny models of the families, and tensors read back from `Weights`."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading import read_source
from outpace.loading.open import open_weights
from outpace.loading.weights import Source, Weights
from tests.models import tiny

FAMILIES = ("llama", "gpt2", "opt", "bloom", "gpt_neox", "falcon", "bert", "t5")


def state(family: str) -> dict[str, Tensor]:
    """The tensors of a tiny model, each with memory of its own."""
    return {name: value.detach().clone() for name, value in tiny(family).state_dict().items()}


def read(source: Source) -> Tensor:
    """A tensor put together from its pieces, which write each element once and have the dtype they claim."""
    written = torch.zeros(source.shape, dtype=torch.int32)
    for piece in source.pieces:
        assert piece.dtype == source.dtype
        written[piece.into] += 1
    assert bool((written == 1).all())
    return read_source.read(source)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same; NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check_equal(weights: Weights, expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits in each tensor."""
    assert weights.sources.keys() == expected.keys()
    for name, source in weights.sources.items():
        assert same_bits(read(source), expected[name]), name


def refused(source: object, **options: object) -> str:
    """What the error says about a checkpoint that cannot be opened."""
    with pytest.raises(ModelError) as caught:
        open_weights(source, **options)  # type: ignore[arg-type]
    return str(caught.value)


class Harm:
    """Runs code when it is unpickled as pickle does it: makes a folder, which a test looks for."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.place),)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """As `open_weights` takes them."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def split(tensors: Mapping[str, Tensor], degree: int, version: float = 2.0) -> list[dict[str, Tensor]]:
    """What each rank would save: matrices split in one of their dimensions, fused query, key, value as in Megatron."""
    ranks: list[dict[str, Tensor]] = [{} for _ in range(degree)]
    for number, (name, value) in enumerate(tensors.items()):
        for rank, part in zip(ranks, _parts(name, value, degree, version, number), strict=True):
            rank[name] = part.clone()
    return ranks


def _parts(name: str, value: Tensor, degree: int, version: float, number: int) -> list[Tensor]:
    if "query_key_value" in name:
        if version != 0:
            return list(value.chunk(degree))
        query, key, value = (part.chunk(degree) for part in value.chunk(3))  # type: ignore[assignment]
        return [torch.cat(parts) for parts in zip(query, key, value, strict=True)]
    dim = number % 2
    if value.dim() < 2 or value.shape[dim] % degree:
        return [value] * degree
    return list(value.chunk(degree, dim))
