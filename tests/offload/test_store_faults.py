"""What goes wrong with disks, memory and processes: an error says so, and never are there other bytes than were put."""

import errno
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Self

import numpy as np
import pytest
import torch

from outpace.errors import OffloadError
from outpace.offload import store_layout, store_memory
from outpace.offload.store_layout import ALIGN
from outpace.offload.store_memory import aligned, free_memory
from outpace.offload.store_read import UnitFile
from outpace.offload.store_write import UnitWriter
from tests.offload.store_process import SIZES, unit
from tests.offload.stores import assert_right, write
from tests.patience import PATIENCE

LAST = len(SIZES) - 1
END = store_layout.Layout("k", SIZES).total
"""Where the last unit ends."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[UnitFile]:
    file = write(tmp_path)
    yield file
    file.close()


def read(file: UnitFile, index: int) -> None:
    file.read(index, aligned(file.sizes[index])).wait()


def alter(path: Path, change: Callable[[IO[bytes]], object]) -> None:
    """Change a file in place, as somebody else would."""
    with path.open("r+b") as raw:
        change(raw)
        raw.flush()
        os.fsync(raw.fileno())


def swap_pages(raw: IO[bytes]) -> None:
    """The first two pages of the last unit change places."""
    start = raw.seek(END - store_layout.padded(SIZES[LAST]))
    first, second = raw.read(ALIGN), raw.read(ALIGN)
    raw.seek(start)
    raw.write(second + first)


def zero_page(raw: IO[bytes]) -> None:
    raw.seek(END - 5 * ALIGN)
    raw.write(bytes(ALIGN))


def flip_bit(raw: IO[bytes]) -> None:
    place = raw.seek(END - 3 * ALIGN - 77)
    byte = raw.read(1)[0]
    raw.seek(place)
    raw.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("change", [flip_bit, zero_page, swap_pages], ids=lambda change: change.__name__)
def test_f9_altered_bytes_are_an_error(file: UnitFile, change: Callable[[IO[bytes]], None]) -> None:
    alter(file.path, change)
    with pytest.raises(OffloadError, match=rf"^{re.escape(str(file.path))}, unit {LAST}: wrong checksum .* file again"):
        read(file, LAST)
    for index in range(LAST):  # the others are as they were
        read(file, index)


def test_f9_a_file_cut_while_it_is_open_is_an_error(file: UnitFile) -> None:
    for length in (END - 1, 6 * ALIGN, 100, 0):
        os.truncate(file.path, length)
        with pytest.raises(OffloadError, match=f"unit {LAST}: the file ends [0-9]+ bytes too early: it was truncated"):
            read(file, LAST)


def test_f9_a_file_replaced_while_it_is_open_is_read_as_it_was(file: UnitFile, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(file.path.stat().st_size))
    other.rename(file.path)
    assert_right(file)
    file.path.unlink()
    assert_right(file)


def test_f9_an_error_of_the_disk_is_an_error_of_the_unit_alone(file: UnitFile, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, bad = os.preadv, END - ALIGN

    def broken(number: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OffloadError, match=f"unit {LAST}: .*Input/output error; check the disk"):
        read(file, LAST)
    read(file, 0)


@pytest.mark.parametrize("most", [3 * ALIGN + 100, ALIGN])
def test_f9_short_reads_go_on_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    file = write(tmp_path, sizes=(300_000, 5))
    preadv = os.preadv
    counts = set[int]()

    def short(number: int, buffers: list[memoryview], offset: int) -> int:
        count = min(preadv(number, buffers, offset), most)
        counts.add(count)
        buffers[0][count:] = bytes(len(buffers[0]) - count)  # nothing that this call did not read may count
        return count

    monkeypatch.setattr(os, "preadv", short)
    assert_right(file)
    file.close()
    assert most in counts


def test_f9_reads_that_get_nowhere_end(file: UnitFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    with pytest.raises(OffloadError, match="too early"):
        read(file, 0)


def test_f9_a_damaged_or_cut_file_is_not_found_and_made_anew(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.close()
    header = store_layout.Layout("k", SIZES).header_bytes
    for place in (0, 9, 40, 60, header - 1, END):  # END: of the note
        alter(file.path, lambda raw, place=place: (raw.seek(place), raw.write(b"\xff")))  # type: ignore[misc]
        assert UnitFile.find(tmp_path, "k", SIZES) is None
        again = write(tmp_path)
        assert_right(again)
        again.close()
    for length in (0, 10, header, header + 1, file.path.stat().st_size - 1):
        os.truncate(file.path, length)
        assert UnitFile.find(tmp_path, "k", SIZES) is None
        again = write(tmp_path)
        again.close()


def test_f9_checksums_see_what_disks_do() -> None:
    """Flipped bits, stale, zeroed and swapped pages and words, at random places of a piece that is not whole."""
    numbers = random.Random(0)
    data = unit(0, 64 * ALIGN).numpy()
    stale = unit(1, 64 * ALIGN).numpy()
    right = store_layout.checksums(data)[0]
    for _ in range(200):
        page, other = (slice(at * ALIGN, (at + 1) * ALIGN) for at in numbers.sample(range(64), 2))
        word, second = (slice(8 * at, 8 * at + 8) for at in numbers.sample(range(64 * ALIGN // 8), 2))
        bits = [(numbers.randrange(len(data)), 1 << numbers.randrange(8)) for _ in range(numbers.randint(1, 3))]
        for change in range(5):
            altered = data.copy()
            if change == 0:
                for byte, bit in bits:
                    altered[byte] ^= bit
            elif change == 1:
                altered[page] = 0
            elif change == 2:
                altered[page] = stale[page]
            elif change == 3:
                altered[page], altered[other] = data[other], data[page]
            else:
                altered[word], altered[second] = data[second], data[word]
            if not np.array_equal(altered, data):
                assert store_layout.checksums(altered)[0] != right


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        yield


def test_f9_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(f_bavail=1000, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    with failing(monkeypatch, "posix_fallocate", errno.ENOSPC):
        with pytest.raises(
            OffloadError, match=r"needs 14.\d\d MB, 1.00 MB are free, 13.\d\d MB are missing; make room"
        ):
            UnitWriter(tmp_path, "k", SIZES).__enter__()
        assert list(tmp_path.iterdir()) == []


def test_f9_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with UnitWriter(tmp_path, "k", SIZES) as writer:
        writer.put(1, unit(1, SIZES[1]))
        full = pytest.raises(OffloadError, match="a quota or limit does not allow that much")
        with failing(monkeypatch, "pwrite", errno.ENOSPC), full:
            writer.put(0, unit(0, SIZES[0]))
    assert list(tmp_path.iterdir()) == []


def test_f9_a_limit_of_the_system(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OffloadError, match="a quota or limit does not allow that much"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_f9_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(OffloadError, match=r"cannot be written: .*; name a folder on a writable disk"):
        write(tmp_path / "taken" / "below")


def test_f9_short_writes_go_on_and_writes_that_get_nowhere_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda number, data, at: pwrite(number, data[: 17 * ALIGN], at))
        file = write(tmp_path)
    assert_right(file)
    file.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: 0)
        with pytest.raises(OffloadError, match="no progress"):
            write(tmp_path, "other")


def test_f10_memory_that_is_not_there() -> None:
    free = free_memory()
    assert free is not None
    with pytest.raises(
        OffloadError, match=r"GB of host memory requested, .* are free: .* missing; keep less in host memory"
    ):
        aligned(free + (1 << 40))
    with pytest.raises(OffloadError, match=r"GB of page-locked host memory requested, .* missing"):
        aligned(free + (1 << 40), pinned=True)


def test_f10_a_limit_of_the_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (
        ("max", "5000000"),
        ("current", "4000000"),
        ("stat", "anon 3500000\nfile 600000\nactive_file 200000\ninactive_file 300000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(content)
    monkeypatch.setattr(store_memory, "_GROUPS", tmp_path)
    assert free_memory() == 1_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() != 1_500_000


class Runtime:
    """CUDA's calls that lock memory."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, length: int, _: int) -> int:  # noqa: N802
        self.locked[address] = length
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_f10_memory_that_cannot_be_locked(runtime: Runtime) -> None:
    runtime.code = 2
    with pytest.raises(
        OffloadError, match=r"5.00 MB of page-locked .* cannot be allocated \(cudaHostRegister: error 2\); .* are"
    ):
        aligned(5_000_000, pinned=True)


def test_locked_memory_is_let_go_with_the_last_tensor(runtime: Runtime) -> None:
    memory = aligned(5_000_000, pinned=True)
    assert runtime.locked == {memory.data_ptr(): memory.numel()}
    view = memory[4096:].view(torch.int32)
    del memory
    assert runtime.locked
    del view
    assert not runtime.locked


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be locked")
def test_f10_without_a_gpu_nothing_can_be_locked() -> None:
    with pytest.raises(OffloadError, match="there is no GPU to lock it for"):
        aligned(1, pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_locked_memory_on_a_gpu(file: UnitFile) -> None:
    memory = aligned(SIZES[0], pinned=True)
    assert memory.is_pinned()
    file.read(0, memory).wait()
    assert torch.equal(memory.to("cuda", non_blocking=True)[: SIZES[0]].cpu(), unit(0, SIZES[0]))


class Other:
    """A process that writes the same file."""

    def __init__(self, role: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.offload.store_process", role, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:  # closes its streams and waits
            pass

    def hear(self, words: str) -> None:
        """Read its lines up to one that begins so."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            if line.startswith(words):
                return
            lines.append(line)
        pytest.fail(f"it said {lines}, not {words}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.mark.slow
def test_f13_a_writer_that_is_killed_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    old = write(tmp_path, sizes=SIZES[:2])
    with Other("named", tmp_path) as named, Other("temporary", tmp_path) as temporary:
        for other in (named, temporary):
            other.hear("writing")
        for other in (named, temporary):
            other.process.kill()
    assert UnitFile.find(tmp_path, "k", SIZES) is None
    again = UnitFile.find(tmp_path, "k", SIZES[:2])
    assert again is not None
    assert_right(again)
    assert len(list(tmp_path.glob("*.writing"))) == 1  # of the one whose file would have had a name
    write(tmp_path, "another").close()
    assert not list(tmp_path.glob("*.writing"))
    new = write(tmp_path)
    for file in (old, again, new):
        assert_right(file)
        file.close()


def test_f13_the_file_gets_its_name_after_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, seen = os.fsync, list[tuple[bool, bool]]()

    def watched(number: int) -> None:
        named = bool(list(tmp_path.glob("*.units")))
        seen.append((os.path.samestat(os.fstat(number), tmp_path.stat()), named))
        fsync(number)

    monkeypatch.setattr(os, "fsync", watched)
    write(tmp_path).close()
    assert seen == [(False, False), (True, True)]  # the file, then its folder


def test_f13_a_disk_that_cannot_keep_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing(monkeypatch, "fsync", errno.EIO), pytest.raises(OffloadError, match="Input/output error"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_f14_the_second_of_two_processes_waits_and_finds_the_file(tmp_path: Path) -> None:
    with Other("named", tmp_path) as first:
        first.hear("writing")
        with Other("named", tmp_path) as second:
            second.hear("waiting for another process that writes")
            first.go_on()
            first.hear("right")
            second.hear("found")
            second.hear("right")
            assert [other.process.wait(PATIENCE) for other in (first, second)] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".units"]


@pytest.mark.slow
def test_f14_whoever_waited_for_one_that_was_killed_writes_the_file(tmp_path: Path) -> None:
    with Other("named", tmp_path) as first:
        first.hear("writing")
        with Other("named", tmp_path) as second:
            second.hear("waiting for another process that writes")
            first.process.kill()
            second.hear("writing")
            second.go_on()
            second.hear("right")
            assert second.process.wait(PATIENCE) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".units"]


def test_f14_the_file_of_one_that_failed_is_written_by_the_next_and_used_by_others(tmp_path: Path) -> None:
    with UnitWriter(tmp_path, "k", SIZES) as writer:
        writer.put(0, unit(0, SIZES[0]))
    with UnitWriter(tmp_path, "k", SIZES) as writer:
        assert writer.found is None
    write(tmp_path).close()
    with UnitWriter(tmp_path, "k", SIZES) as writer:
        assert writer.found is not None
        assert writer.finish() is writer.found
        assert_right(writer.found)
        writer.found.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".units"]
