"""Files of a checkpoint on two machines: equal by what they hold, whatever their times."""

import os
import shutil
from pathlib import Path

import pytest

from outpace.ranks import agree

SIZE = 3 << 20  # past the part that is compared whole


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    made.write_bytes(bytes(range(256)) * (SIZE // 256))
    return made


def test_a_copy_is_the_same(file: Path) -> None:
    other = Path(shutil.copy(file, file.with_name("copy")))
    os.utime(other, (0, 0))
    assert agree.sample(other) == agree.sample(file)


@pytest.mark.parametrize("place", [0, 1000, SIZE - 1, SIZE])
def test_a_changed_byte_at_the_beginning_or_the_end_is_seen(file: Path, place: int) -> None:
    before = agree.sample(file)
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"\x07")
    assert agree.sample(file) != before


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert agree.sample(tmp_path / "config.json")
