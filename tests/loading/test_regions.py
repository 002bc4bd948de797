"""Sources rearranged without reading them give the same tensors as torch's operations."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.loading import regions
from outpace.loading.read_source import read, same
from outpace.loading.regions import Inexpressible
from outpace.loading.weights import Extent, Piece, Source

SHAPE = (4, 6, 2)


class Stored:
    """Tensors in a file, each with its source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"")

    def add(self, tensor: Tensor) -> Source:
        """Write a tensor at the end of the file."""
        offset = self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
        shape = tuple(tensor.shape)
        return Source(shape, tensor.dtype, (Piece(Extent(self.path, offset), shape, tensor.dtype),))


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """An empty file."""
    return Stored(tmp_path / "tensors")


def step(choice: random.Random, source: Source, tensor: Tensor) -> tuple[Source, Tensor]:
    """One operation on both."""
    dim, other = choice.randrange(-tensor.ndim, tensor.ndim), choice.randrange(tensor.ndim)
    match choice.randrange(4):
        case 0:
            start = choice.randrange(tensor.shape[dim])
            stop = choice.randint(start, tensor.shape[dim])
            return regions.cut(source, dim, start, stop), tensor.narrow(dim, start, stop - start)
        case 1:
            return regions.join([source, source], dim), torch.cat([tensor, tensor], dim)
        case 2:
            return regions.stack([source, source], dim), torch.stack([tensor, tensor], dim)
        case _:
            return regions.transpose(source, dim, other), tensor.transpose(dim, other)


def test_any_operations_after_each_other(stored: Stored) -> None:
    choice = random.Random(0)
    values = torch.arange(48.0).reshape(SHAPE)
    first = stored.add(values)
    compared, refused = 0, 0
    for _ in range(300):
        source, tensor = first, values
        for _ in range(choice.randint(1, 5)):
            try:
                source, tensor = step(choice, source, tensor)
            except Inexpressible:
                refused += 1
                break
            if 0 in tensor.shape:
                break
            assert torch.equal(read(source), tensor)
            compared += 1
    assert compared > 500
    assert refused < 200


def test_what_is_whole_stays_whole(stored: Stored) -> None:
    source = stored.add(torch.ones(SHAPE))
    assert regions.cut(source, 0, 0, 4) == source
    assert regions.join([source], dim=1) == source
    assert regions.transpose(regions.transpose(source, 0, 2), 2, 0) == source


def test_parts_of_different_dtypes_get_one_that_holds_both(stored: Stored) -> None:
    parts = [torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1 / 3)]
    joined = regions.join([stored.add(part) for part in parts], 0)
    assert torch.equal(read(joined), torch.cat([part.float() for part in parts]))


def test_only_the_rows_of_a_cut_are_read(stored: Stored) -> None:
    source = stored.add(torch.arange(8.0).reshape(4, 2))
    with stored.path.open("r+b") as file:
        file.truncate(24)  # the last row is gone
    assert read(regions.cut(source, 0, 1, 3)).tolist() == [[2, 3], [4, 5]]
    with pytest.raises(Exception, match="ends too early"):
        read(source)


@pytest.mark.parametrize("shape", [(), (3,), (5, 3), (0, 3)])
def test_comparing(stored: Stored, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr("outpace.loading.read_source._AT_ONCE", 24)  # two rows of the matrix
    values = torch.randn(shape)
    first, second = stored.add(values), stored.add(values)
    assert same(first, first, torch.float32)
    assert same(first, second, torch.float32)
    if values.numel():
        changed: Any = values.clone()
        changed.view(-1)[-1] += 2**-12
        assert not same(first, stored.add(changed), torch.float32)
        assert same(first, stored.add(values.double()), torch.float32)
