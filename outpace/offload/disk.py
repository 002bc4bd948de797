"""Measures how fast a disk reads: blocks with O_DIRECT, by one thread or several.

One thread is the reference for everything that is read from files; layers are read by several.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from outpace.errors import OffloadError
from outpace.offload.store_direct import fill, go_direct, write, writing
from outpace.offload.store_layout import ALIGN
from outpace.offload.store_memory import aligned

_BLOCK = 8 << 20


def measure_disk(folder: str | os.PathLike[str], nbytes: int = 2 << 30, *, threads: int = 1) -> float:
    """Bytes per second at which the disk of `folder` reads; writes and removes a file of `nbytes`."""
    total = max(1, nbytes // _BLOCK) * _BLOCK
    place = Path(folder)
    with writing(place / "a file to measure with", total):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place, prefix="measure-", suffix=".writing") as file:
            _write(file.fileno(), total)
            return _read(file.fileno(), total, place, threads)


def read_rate(path: str | os.PathLike[str], *, threads: int = 1) -> float:
    """Bytes per second at which a file is read."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        total = os.fstat(number).st_size // ALIGN * ALIGN
        return _read(number, total, Path(path), threads)
    finally:
        os.close(number)


def _write(number: int, total: int) -> None:
    """Write blocks that differ, with random bytes that a disk cannot compress."""
    os.posix_fallocate(number, 0, total)
    direct = go_direct(number, to_write=True)
    block = aligned(_BLOCK)
    block.random_(generator=torch.Generator().manual_seed(0))
    data = block.numpy()
    for offset in range(0, total, _BLOCK):
        data[::ALIGN] = offset // _BLOCK % 251
        write(number, data, offset)
    if not direct:
        os.fsync(number)
        os.posix_fadvise(number, 0, total, os.POSIX_FADV_DONTNEED)


def _read(number: int, total: int, path: Path, threads: int) -> float:
    """Bytes per second; the first block is read once before the clock starts."""
    direct = go_direct(number)
    memory = [aligned(_BLOCK).numpy() for _ in range(threads)]
    for data in memory:
        fill(number, data[: min(total, _BLOCK)], 0, _BLOCK, direct)

    def read(thread: int) -> None:
        for offset in range(thread * _BLOCK, total, threads * _BLOCK):
            wanted = min(_BLOCK, total - offset)
            if fill(number, memory[thread][:wanted], offset, _BLOCK, direct) < wanted:
                raise OffloadError(f"{path} was truncated while it was read")

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return total / (time.perf_counter() - begun)
