"""Allocates host memory for disk reads and GPU copies: aligned, with huge pages if possible, or page-locked."""

import mmap
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.errors import OffloadError
from outpace.log import size_text
from outpace.offload.store_layout import Bytes, padded

_GROUPS = Path("/sys/fs/cgroup")
_REMEDY = "keep less in host memory (offload.host_memory), or end what else uses it"


def aligned(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Host memory of `nbytes` rounded up to ALIGN, at an aligned address; page-locked if `pinned`.

    Page-locked memory has exactly this size (torch's allocator rounds up to a power of two). Copies from it must have
    ended before the last tensor that uses it is freed.
    """
    length = padded(nbytes)
    what = f"{size_text(length)} of {'page-locked ' if pinned else ''}host memory"
    free = free_memory()
    if free is not None and length > free:
        raise OffloadError(
            f"{what} requested, {size_text(free)} are free: {size_text(length - free)} missing; {_REMEDY}"
        )
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = _map(length)
        data = np.frombuffer(memory, dtype=np.uint8)
        if pinned:
            memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy all locked pages at once
            _lock(data)
    except (OSError, RuntimeError, AssertionError) as error:
        there = "the free memory is unknown" if free is None else f"{size_text(free)} are free"
        raise OffloadError(f"{what} cannot be allocated ({error}); {there}; {_REMEDY}") from error
    return torch.from_numpy(data)


def free_memory() -> int | None:
    """Bytes of host memory that this process can still allocate, by the machine and its cgroups; None: unknown."""
    machine = _fields(Path("/proc/meminfo")).get("MemAvailable:")
    known = [None if machine is None else 1024 * machine, *map(_group_memory, _groups())]
    return min((free for free in known if free is not None), default=None)


def _groups() -> list[Path]:
    """The cgroup of this process and its parents."""
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
    """Page-lock memory for GPUs until the array is freed."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to lock it for")
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(data.ctypes.data, data.nbytes, 1))  # 1: for every device of this process
    if code:
        raise RuntimeError(f"cudaHostRegister: error {code}")
    weakref.finalize(data, runtime.cudaHostUnregister, data.ctypes.data).atexit = False  # the driver is gone by then


def _group_memory(folder: Path) -> int | None:
    """Free bytes of a cgroup (version 2), counting its page cache as free; None: no group or no limit."""
    try:
        most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        return None
    counts = _fields(folder / "memory.stat")
    cached = counts.get("active_file", 0) + counts.get("inactive_file", 0)
    return max(0, most - used + cached)


def _fields(path: Path) -> dict[str, int]:
    """Parse a file with lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not Linux
        return {}
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1 and words[1].isdigit()}


class _CudaArray:
    """Page-locked host memory as a CUDA array: its address is the same for the GPU."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # keeps the memory alive while a tensor uses it
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def mapped(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory for kernels on `device`; on a CPU an ordinary tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = aligned(size, pinned=device.type == "cuda")
    if device.type == "cuda":
        with torch.cuda.device(device):
            memory = torch.as_tensor(_CudaArray(memory), device=device)
    return memory[:size].view(dtype).view(shape)
