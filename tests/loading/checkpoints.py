"""Help for tests of checkpoints: tiny models of the families, and tensors read back from `Weights`."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.open import open_weights
from outpace.loading.weights import Extent, Source, Weights
from tests.models import tiny

FAMILIES = ("llama", "gpt2", "opt", "bloom", "gpt_neox", "falcon", "bert", "t5")


def state(family: str) -> dict[str, Tensor]:
    """The tensors of a tiny model, each with memory of its own."""
    return {name: value.detach().clone() for name, value in tiny(family).state_dict().items()}


def read(source: Source) -> Tensor:
    """A tensor put together from its pieces; each element is written once."""
    whole = torch.empty(source.shape, dtype=source.dtype)
    written = torch.zeros(source.shape, dtype=torch.int32)
    for piece in source.pieces:
        assert piece.dtype == source.dtype
        if isinstance(piece.place, Extent):
            with piece.place.path.open("rb") as file:
                file.seek(piece.place.offset)
                data = bytearray(file.read(piece.nbytes))
            flat = torch.frombuffer(data, dtype=piece.dtype) if data else torch.empty(0, dtype=piece.dtype)
            stored = flat.reshape(piece.shape)
        else:
            stored = piece.place()
        assert (stored.shape, stored.dtype) == (piece.shape, piece.dtype)
        part = stored[piece.take]
        whole[piece.into] = part if piece.swap is None else part.transpose(*piece.swap)
        written[piece.into] += 1
    assert bool((written == 1).all())
    return whole


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
