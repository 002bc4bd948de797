"""Blocks in a file: the prefix cache level below host memory.

The file is unlinked as soon as it is open, so that nothing outlives the process and no other process's data can be
read. A checksum of every block is kept in memory. A block that does not read back as it was written counts as
missing.
"""

import errno
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from outpace.errors import ConfigError
from outpace.log import logger

SECTOR = 4096
"""Alignment of direct reads and writes in bytes: file offset, memory address and length."""
GIB = 1 << 30


class FileBlocks:
    """Blocks of one size in a preallocated file. Threads may read and write different blocks at the same time."""

    def __init__(self, folder: str, num_blocks: int, block_bytes: int) -> None:
        """block_bytes: a multiple of `SECTOR`; memory that is read to and written from is aligned to it."""
        assert block_bytes % SECTOR == 0, "whole sectors"
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.num_failed = 0
        """Reads and writes that failed so far."""
        self._checksums: dict[int, int] = {}
        self._file = _open(folder, num_blocks * block_bytes)
        self.close = weakref.finalize(self, os.close, self._file)
        """Frees the disk space; so does deleting this object or ending the process."""

    def write(self, block: int, data: memoryview) -> bool:
        """Write a block; False if the write failed: the block is not stored."""
        self._checksums.pop(block, None)
        whole = self._whole("written", lambda begin: os.pwrite(self._file, data[begin:], self._place(block) + begin))
        if whole:
            self._checksums[block] = zlib.crc32(data)
        return whole

    def read(self, block: int, data: memoryview) -> bool:
        """Read a block; False if it cannot be read as it was written: then `data` is garbage."""
        checksum = self._checksums.get(block)
        if checksum is None:
            return False
        if not self._whole("read", lambda begin: os.preadv(self._file, [data[begin:]], self._place(block) + begin)):
            return False
        return zlib.crc32(data) == checksum or self._fail("read", "its checksum is wrong")

    def _place(self, block: int) -> int:
        return block * self.block_bytes

    def _whole(self, what: str, go_on: Callable[[int], int]) -> bool:
        """Whether a block was read or written to its end."""
        done = 0
        try:
            while done < self.block_bytes:
                count = go_on(done)
                if count <= 0:
                    return self._fail(what, f"{done} of {self.block_bytes} bytes")
                done += count
        except OSError as error:
            return self._fail(what, error.strerror or str(error))
        return True

    def _fail(self, what: str, why: str) -> bool:
        if self.num_failed == 0:
            logger.warning(
                "offload.kv_files: a block could not be %s (%s) and is recomputed; further failures are only counted",
                what,
                why,
            )
        self.num_failed += 1
        return False


def room_in(folder: str) -> int:
    """Free bytes on the file system of a folder, which need not exist yet."""
    path = Path(folder).absolute()
    there = os.statvfs(next(each for each in (path, *path.parents) if each.exists()))
    return there.f_bavail * there.f_frsize


def _open(folder: str, size: int) -> int:
    """An unlinked file of this size, opened for direct I/O if the file system supports it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        opened = _nameless(folder)
        try:
            os.posix_fallocate(opened, 0, size)
        except OSError:
            os.close(opened)
            raise
    except OSError as error:
        text = f"offload.kv_files: {size / GIB:.1f} GiB in {folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += f", {room_in(folder) / GIB:.1f} GiB are free; give less"
        raise ConfigError(text) from error
    return opened


def _nameless(folder: str) -> int:
    handle, name = tempfile.mkstemp(prefix=".outpace-kv-", dir=folder)
    try:
        with suppress(OSError, AttributeError):  # some systems and file systems have no O_DIRECT
            direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            if _works(direct):
                os.close(handle)
                return direct
            os.close(direct)
        return handle
    finally:
        Path(name).unlink()


def _works(direct: int) -> bool:
    """Whether direct writes work: some file systems refuse the write, not the open."""
    try:
        with mmap.mmap(-1, SECTOR) as page:
            return os.pwrite(direct, page, 0) == SECTOR
    except OSError:
        return False
