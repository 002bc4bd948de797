"""Reads and writes with O_DIRECT, and turns the system's errors into messages."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.errors import OffloadError
from outpace.log import size_text
from outpace.offload.store_layout import ALIGN, Bytes
from outpace.offload.store_memory import aligned

_STALLS = 8
"""Consecutive reads or writes of less than a page before they count as failed."""


def go_direct(number: int, *, to_write: bool = False) -> bool:
    """Switch an open file to O_DIRECT; False: its file system does not support it.

    Tested by reading the first page, or writing zeros to it: some file systems accept the flag and then fail.
    """
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    page = aligned(ALIGN).numpy().data
    try:
        fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(number, page, 0) if to_write else os.preadv(number, [page], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(number, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return False
    return True


def fill(number: int, data: Bytes, offset: int, block: int, direct: bool) -> int:
    """Fill `data` from `offset` on, at most `block` bytes per call; returns how many bytes were read."""
    done = stalls = 0
    while done < len(data) and stalls < _STALLS:
        count = os.preadv(number, [data[done : done + block].data], offset + done)
        if not count:
            break
        kept = count // ALIGN * ALIGN  # a partial page is read again: O_DIRECT reads at page boundaries only
        stalls = 0 if kept else stalls + 1
        done += kept
    if not direct:
        os.posix_fadvise(number, offset, len(data), os.POSIX_FADV_DONTNEED)
    return done


def write(number: int, data: Bytes, offset: int) -> None:
    """Write all of `data`, whose length and address are multiples of ALIGN."""
    done = stalls = 0
    while done < len(data):
        count = os.pwrite(number, data[done:].data, offset + done) // ALIGN * ALIGN
        stalls = 0 if count else stalls + 1
        if stalls == _STALLS:
            raise OSError(errno.EIO, "no progress")
        done += count


@contextmanager
def writing(path: Path, total: int) -> Iterator[None]:
    """Turn OSErrors while `path` (of `total` bytes) is written into errors that say what is missing."""
    try:
        yield
    except OSError as error:
        raise OffloadError(f"{path} cannot be written: {_why(error, path, total)}") from error


def _why(error: OSError, path: Path, total: int) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error.strerror}; name a folder on a writable disk (offload.nvme)"
    remedy = "make room, or name a folder on another disk (offload.nvme)"
    try:
        room = os.statvfs(path.parent)
        free = room.f_bavail * room.f_frsize
    except OSError:
        free = total
    if free >= total:
        return (
            f"it needs {size_text(total)}, and a quota or limit does not allow that much ({error.strerror}); {remedy}"
        )
    return f"it needs {size_text(total)}, {size_text(free)} are free, {size_text(total - free)} are missing; {remedy}"
