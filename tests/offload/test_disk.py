"""How fast a disk reads."""

import errno
import os
from pathlib import Path

import pytest

from outpace.errors import OffloadError
from outpace.offload.disk import measure_disk, read_rate
from tests.offload.stores import write


def test_a_rate_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "new", 20 << 20) > 0
    assert list((tmp_path / "new").iterdir()) == []


def test_the_rate_of_a_file(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert read_rate(file.path) > 0
    file.close()


def test_f9_a_disk_without_room_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"a file to measure with cannot be written: it needs 16.78 MB"):
        measure_disk(tmp_path, 20 << 20)
