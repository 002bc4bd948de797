"""The unit file: what was put comes back, in the order asked, through any number of threads."""

import errno
import fcntl
import gc
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.errors import ConfigError, InputError, OffloadError, StateError
from outpace.offload.store_layout import ALIGN
from outpace.offload.store_memory import aligned
from outpace.offload.store_read import ReadOptions, UnitFile
from outpace.offload.store_write import UnitWriter
from tests.offload.store_process import SIZES, unit
from tests.offload.stores import NOTE, assert_right, readers, write
from tests.patience import PATIENCE


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


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(threads=1),
        ReadOptions(threads=3, block=ALIGN * 100),
        ReadOptions(threads=20, block=5 << 20),
        ReadOptions(block=64 << 20),
    ],
    ids=str,
)
def test_any_number_of_threads_and_bytes_of_a_read(file: UnitFile, tmp_path: Path, options: ReadOptions) -> None:
    again = UnitFile.find(tmp_path, "k", SIZES, options=options)
    assert again is not None
    assert_right(again)
    again.close()


def test_only_the_file_of_the_same_key_and_sizes_is_found(file: UnitFile, tmp_path: Path) -> None:
    assert UnitFile.find(tmp_path, "other", SIZES) is None
    assert UnitFile.find(tmp_path, "k", SIZES[:-1]) is None
    assert UnitFile.find(tmp_path, "k", (*SIZES[:-1], SIZES[-1] + 1)) is None
    assert UnitFile.find(tmp_path / "nowhere", "k", SIZES) is None


def test_units_begin_at_pages(file: UnitFile) -> None:
    """Straight from the disk into the caller's memory: nothing is copied on the way."""
    assert file.path.stat().st_size % ALIGN == 0
    assert aligned(1).data_ptr() % ALIGN == 0
    assert aligned(ALIGN + 1).numel() == 2 * ALIGN
    assert aligned(0).numel() == 0


def test_units_are_read_in_the_order_asked(file: UnitFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = UnitFile.find(tmp_path, "k", SIZES, options=ReadOptions(threads=1, block=4 << 20))
    assert single is not None
    offsets: list[int] = []
    preadv = os.preadv

    def watched(number: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return preadv(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    memory = [aligned(max(SIZES)) for _ in range(3)]
    for reading in [single.read(index, into) for index, into in zip((4, 0, 1), memory, strict=True)]:
        reading.wait()
    single.close()
    last, first, second = offsets[:3], offsets[3:5], offsets[5:]
    assert len(offsets) == 6
    assert max(first) < second[0] < min(last)
    assert [*last, *first] == sorted(last) + sorted(first)


def test_units_may_be_put_in_any_order_by_several_threads(tmp_path: Path) -> None:
    with UnitWriter(tmp_path, "k", SIZES) as writer, ThreadPoolExecutor(3) as pool:
        for _ in pool.map(lambda index: writer.put(index, unit(index, SIZES[index])), (4, 2, 0, 3, 1)):
            pass
        file = writer.finish(NOTE)
    assert_right(file)
    file.close()


def test_memory_that_is_aligned_is_written_without_a_copy_and_may_be_padded(tmp_path: Path) -> None:
    sizes = (9 << 20, 5)
    with UnitWriter(tmp_path, "k", sizes) as writer:
        for index, size in enumerate(sizes):
            memory = aligned(size)
            memory[:size] = unit(index, size)
            memory[size:] = 99  # not part of the unit
            writer.put(index, memory)
        file = writer.finish(NOTE)
    assert_right(file)
    file.close()


def test_a_file_without_units_or_note(tmp_path: Path) -> None:
    with UnitWriter(tmp_path, "k", ()) as writer:
        file = writer.finish()
    assert (file.sizes, file.note) == ((), "")
    file.close()


def test_a_temporary_file_has_no_name(tmp_path: Path) -> None:
    file = write(tmp_path, temporary=True)
    assert list(tmp_path.iterdir()) == []
    assert_right(file)
    file.close()


def test_a_file_system_without_o_direct_is_read_otherwise_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = fcntl.fcntl

    def refuses(number: int, command: int, value: int = 0) -> Any:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(number, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    with caplog.at_level(logging.INFO, logger="outpace"):
        file = write(tmp_path)
    assert not file.direct
    assert f"offload reads: through the page cache ({tmp_path} does not support O_DIRECT)" in caplog.messages
    assert_right(file)
    file.close()


def test_close_waits_for_what_is_being_read_and_gives_up_the_rest(
    file: UnitFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = UnitFile.find(tmp_path, "k", SIZES, options=ReadOptions(threads=1, block=4 << 20))
    assert single is not None
    begun, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(number: int, buffers: list[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(PATIENCE)
        return preadv(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    readings = [single.read(index, aligned(SIZES[index])) for index in (1, 4)]
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=single.close)
    closing.start()
    with pytest.raises(OffloadError, match="unit 4: the file was closed before it was read"):
        readings[1].wait()
    assert closing.is_alive()
    assert not readings[0].done()
    go_on.set()
    closing.join(PATIENCE)
    readings[0].wait()
    with pytest.raises(StateError, match=r"is closed: the engine .* has ended; make a new one"):
        single.read(0, aligned(SIZES[0]))


def test_a_file_that_nobody_holds_ends_its_threads(tmp_path: Path) -> None:
    before = readers()
    file = write(tmp_path)
    assert_right(file)
    mine = readers() - before
    assert len(mine) == ReadOptions().threads
    del file
    gc.collect()
    for thread in mine:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_fork_is_told_to_open_the_file_itself(file: UnitFile, monkeypatch: pytest.MonkeyPatch) -> None:
    process = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(StateError, match="opened by another process"):
            file.read(0, aligned(SIZES[0]))


def test_a_machine_that_allows_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path)
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        assert_right(file)
    file.close()
    other = UnitFile.find(tmp_path, "k", SIZES)
    assert other is not None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(OffloadError, match="can't start new thread"):
            other.read(0, aligned(SIZES[0]))
    other.close()


def test_memory_that_cannot_be_read_into_is_refused(file: UnitFile) -> None:
    memory = aligned(SIZES[0])
    for into in (memory[1:], memory.view(torch.int32), memory[::2], torch.empty(SIZES[0], device="meta").byte()):
        with pytest.raises(InputError, match="into: bytes of host memory at a multiple of 4096"):
            file.read(0, into)
    with pytest.raises(InputError, match="into: 4096 bytes are too few"):
        file.read(0, memory[:ALIGN])
    with pytest.raises(InputError, match=r"index: .* has no unit 5, only 5"):
        file.read(5, memory)
    with pytest.raises(InputError, match="index"):
        file.read(-1, memory)


def test_units_that_cannot_be_put_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sizes"):
        UnitWriter(tmp_path, "k", (-1,))
    with UnitWriter(tmp_path, "k", SIZES) as writer:
        with pytest.raises(InputError, match="index: there is no unit 5"):
            writer.put(5, unit(0, 1))
        with pytest.raises(InputError, match="data: unit 2 has 1 bytes, not 0"):
            writer.put(2, unit(0, 0))
        with pytest.raises(InputError, match="data: contiguous bytes"):
            writer.put(2, torch.zeros(1))
        writer.put(2, unit(2, 1))
        with pytest.raises(StateError, match="unit 2 was put already"):
            writer.put(2, unit(2, 1))
        with pytest.raises(StateError, match=r"units \[0, 1, 3, 4\] were not put"):
            writer.finish()
    with pytest.raises(StateError, match="not open for writing"):
        writer.put(0, unit(0, SIZES[0]))
    assert list(tmp_path.iterdir()) == []


def test_options() -> None:
    with pytest.raises(ConfigError, match="threads: 0"):
        ReadOptions(threads=0)
    with pytest.raises(ConfigError, match="block: 5000"):
        ReadOptions(block=5000)
    assert ReadOptions.of_aio(None, None, None) == ReadOptions()
    assert ReadOptions.of_aio(4, 1 << 20, 128) == ReadOptions(threads=4, block=1 << 20)
    assert ReadOptions.of_aio(16, None, 2).threads == 2
