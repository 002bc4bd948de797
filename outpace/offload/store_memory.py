"""Host memory that disks read into and GPUs copy from: aligned, in huge pages where there are any, or page-locked."""

import mmap
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outpace.errors import OffloadError
from outpace.log import size_text
from outpace.offload.store_layout import Bytes, padded

_GROUPS = Path("/sys/fs/cgroup")
_REMEDY = "keep less in host memory (offload.host_memory), or end what else uses it"


def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Host memory of `nbytes` rounded up to ALIGN, at an address that is a multiple of it; page-locked if `pinned`.

    Page-locked memory is exactly as large as asked (torch's own allocator rounds up to a power of two). Copies from it
    must have ended before the last tensor that uses it goes.
    """
    length = padded(nbytes)
    what = f"{size_text(length)} of {'page-locked ' if pinned else ''}host memory"
    free = free_memory()
    if free is not None and length > free:
        raise OffloadError(f"{what} wanted, {size_text(free)} are free: {size_text(length - free)} missing; {_REMEDY}")
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = _map(length)
        data = np.frombuffer(memory, dtype=np.uint8)
        if pinned:
            memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy locked pages at once, all of them
            _lock(data)
    except (OSError, RuntimeError, AssertionError) as error:
        there = "nobody says how much is free" if free is None else f"{size_text(free)} are free"
        raise OffloadError(f"{what} cannot be had ({error}); {there}; {_REMEDY}") from error
    return torch.from_numpy(data)


def free_memory() -> int | None:
    """Bytes of host memory that this process can still take: of the machine, and of its cgroup; None: nobody says."""
    machine = _fields(Path("/proc/meminfo")).get("MemAvailable:")
    known = [None if machine is None else 1024 * machine, *map(_group_memory, _groups())]
    return min((free for free in known if free is not None), default=None)


def _groups() -> list[Path]:
    """The cgroup of this process and those that it is in."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((_GROUPS / line[3:].lstrip("/") for line in lines if line.startswith("0::")), _GROUPS)
    return [own, *(folder for folder in own.parents if folder.is_relative_to(_GROUPS))]


def _map(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _lock(data: Bytes) -> None:
    """Page-lock memory for GPUs until the array goes."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to lock it for")
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 1))  # 1: for every device of this process
    if code:
        raise RuntimeError(f"cudaHostRegister: error {code}")
    weakref.finalize(data, runtime.cudaHostUnregister, data.ctypes.data).atexit = False  # the driver is gone by then


def _group_memory(folder: Path) -> int | None:
    """What a cgroup (version 2) has left, with what its page cache would give back; None: no group, or no limit."""
    try:
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        return None
    counts = _fields(folder / "memory.stat")
    cached = counts.get("active_file", 0) + counts.get("inactive_file", 0)
    return max(0, most - used + cached)


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not Linux
        return {}
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1 and words[1].isdigit()}
