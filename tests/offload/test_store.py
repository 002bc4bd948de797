"""The unit file: what is written comes back, and what was cut, altered or never finished does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outpace.offload.store import ALIGN, UnitFile, UnitWriter, aligned

SIZES = (5_000_000, ALIGN, 1, 0, 9_000_001)
"""Units of several pieces, of whole and broken pages, and of nothing."""


def unit(index: int, size: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


def write(folder: Path, key: str = "k", sizes: tuple[int, ...] = SIZES, *, temporary: bool = False) -> UnitFile:
    with UnitWriter(folder, key, sizes, temporary=temporary) as writer:
        for index, size in enumerate(sizes):
            writer.put(index, unit(index, size))
        return writer.finish()


def read_all(file: UnitFile) -> list[Tensor]:
    memory = [aligned(size) for size in file.sizes]
    readings = [file.read(index, into) for index, into in enumerate(memory)]
    for reading in readings:
        reading.wait()
        assert reading.done()
    return [into[:size] for into, size in zip(memory, file.sizes, strict=True)]


def assert_right(file: UnitFile) -> None:
    for index, found in enumerate(read_all(file)):
        assert torch.equal(found, unit(index, file.sizes[index]))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[UnitFile]:
    file = write(tmp_path)
    yield file
    file.close()


def test_units_come_back_as_they_were_put(file: UnitFile, tmp_path: Path) -> None:
    assert_right(file)
    again = UnitFile.find(tmp_path, "k", SIZES)
    assert again is not None
    assert_right(again)
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]
