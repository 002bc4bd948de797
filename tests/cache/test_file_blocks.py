import mmap
import os
from pathlib import Path

import pytest

from outpace.cache import file_blocks
from outpace.cache.file_blocks import SECTOR, FileBlocks, room_in
from outpace.errors import ConfigError

SIZE = 2 * SECTOR


def page(fill: bytes) -> memoryview:
    """Memory as direct reads and writes need it."""
    memory = mmap.mmap(-1, SIZE)
    memory[:] = fill * (SIZE // len(fill))
    return memoryview(memory)


def test_blocks_come_back_as_they_were_and_the_file_has_no_name(tmp_path: Path) -> None:
    files = FileBlocks(str(tmp_path), 5, SIZE)
    assert list(tmp_path.iterdir()) == []
    for block, fill in ((4, b"ab"), (0, b"cd"), (4, b"ef")):
        assert files.write(block, page(fill))
    for block, fill in ((4, b"ef"), (0, b"cd")):
        found = page(b"--")
        assert files.read(block, found)
        assert found == page(fill)
    assert not files.read(1, page(b"--")), "it was never written"
    assert files.num_failed == 0
    files.close()


def test_without_direct_reads_it_works_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_blocks, "_works", lambda _: False)
    files, found = FileBlocks(str(tmp_path), 2, SIZE), page(b"--")
    assert files.write(1, page(b"xy"))
    assert files.read(1, found)
    assert found == page(b"xy")


@pytest.mark.parametrize("fault", ["read error", "short read", "cut", "altered"])
def test_f_9_what_cannot_be_read_as_it_was_written_counts_as_not_there(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = FileBlocks(str(tmp_path), 3, SIZE)
    assert files.write(2, page(b"xy"))
    if fault == "read error":
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    elif fault == "short read":
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
    elif fault == "cut":
        os.ftruncate(files._file, 2 * SIZE + SECTOR)
    else:
        os.pwrite(files._file, page(b"XY"), 2 * SIZE)
    for _ in range(2):
        assert not files.read(2, page(b"--"))
    assert files.num_failed == 2
    assert len([record for record in caplog.records if "offload.kv_files" in record.message]) == 1, "it is said once"


def test_f_9_a_full_disk_while_running_loses_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileBlocks(str(tmp_path), 3, SIZE)
    assert files.write(0, page(b"xy"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert not files.write(0, page(b"zz"))
    assert not files.read(0, page(b"--")), "half of it may be new, half old"
    assert files.write(0, page(b"zz"))
    assert files.read(0, page(b"--"))


def test_f_9_a_disk_without_room_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"offload.kv_files: 0.0 GiB in .*: No space left on device, .* free; give"):
        FileBlocks(str(tmp_path), 3, SIZE)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"offload.kv_files: .*(Not a directory|File exists)"):
        FileBlocks(str(tmp_path / "file"), 3, SIZE)


def test_the_folder_is_made_and_its_room_is_known_before(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "one"
    assert room_in(str(folder)) == room_in(str(tmp_path)) > 0
    assert FileBlocks(str(folder), 1, SIZE).write(0, page(b"xy"))
