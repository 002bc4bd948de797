"""The torch.distributed world of ranks that LLM starts: how it is checked, joined and left."""

import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from outpace.errors import ConfigError, StateError
from outpace.log import size_text
from outpace.offload.store_memory import free_memory
from outpace.parallel.mesh import BACKENDS, STARTED_BY, mark_as_of_llm

HOST = "127.0.0.1"
SHARE = "OUTPACE_RANKS_SHARE_DEVICE"
"""Environment variable: all ranks use the first GPU, with gloo, for tests on a machine with one GPU."""
PATIENCE = timedelta(minutes=30)  # timeout of a collective: a rank may still be reading weights or compiling kernels
MEETING = timedelta(seconds=20)  # seconds for the ranks of several machines to connect with each other
_ALL_HERE = "outpace/all ranks are here"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_FIELDS = "tensor_parallel_size, pipeline_parallel_size"
RANK_BYTES = 154 << 20
"""Memory that the imports of a rank's process take (torch 2.13 for CPUs)."""


def check_world(size: int, device: str | None, device_type: str, local: int) -> None:
    """Raise before any rank is started if `size` ranks cannot form a world. local: ranks on this machine."""
    if all(name in os.environ for name in STARTED_BY):
        raise ConfigError(
            f"{_FIELDS}: {size} ranks, but torchrun has started this process as one of several; LLM and outpace serve "
            "start their ranks themselves: run the script without torchrun, or use init_inference"
        )
    if dist.is_initialized():
        raise StateError(
            f"{_FIELDS}: this process is in a world of torch.distributed already (another LLM with several ranks, or "
            "your own); shut that one down first, or make this LLM in another process"
        )
    if device_type != "cuda":
        _check_memory(local)
        return
    if device is not None and ":" in device:
        raise ConfigError(
            f"device: {device!r} is one GPU, and there are {size} ranks; give 'cuda', and choose GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if count < local and not shares_device():
        raise ConfigError(f"{_FIELDS}: {local} ranks need a GPU each, and there are {count}; ask for fewer")


def _check_memory(local: int) -> None:
    """On a CPU nothing else bounds the number of ranks: too many would take the memory of all processes."""
    free = free_memory()
    if free is not None and (local - 1) * RANK_BYTES > free:
        raise ConfigError(
            f"{_FIELDS}: {local} ranks need {size_text((local - 1) * RANK_BYTES)} before they load any weights, and "
            f"{size_text(free)} are free; ask for at most {1 + free // RANK_BYTES}"
        )


def shares_device() -> bool:
    """Whether all ranks use one GPU."""
    return bool(os.environ.get(SHARE))


def device_of(rank: int, device_type: str, local: int) -> str:
    """The device of a rank. local: ranks per machine."""
    return "cpu" if device_type == "cpu" else f"cuda:{0 if shares_device() else rank % local}"


def meet(
    size: int, port: int, listening: int | None = None, patience: timedelta = PATIENCE, host: str = HOST
) -> TCPStore:
    """Connect to a world's store at this port, or host it; the host must start it before others connect.

    On one machine the host is not the first rank: a rank that waits at a store gets an error as soon as the host ends,
    and the first rank, which may be the user's process, must not hang. On several machines it is the first rank: its
    connection to the store is cut when others are lost (see `leader`).
    """
    keeps = listening is not None
    store = TCPStore(host, port, size, keeps, patience, wait_for_workers=False, master_listen_fd=listening)
    store.set_timeout(PATIENCE)
    return store


def all_here(store: TCPStore) -> None:
    """Record in the store that the ranks of all machines have found it."""
    store.set(_ALL_HERE, "")


def join(store: TCPStore, rank: int, size: int, device: str, local: int) -> None:
    """Join a world as one of its ranks. local: ranks on this machine.

    Ranks on several machines first wait until all have found the store. After that, a machine that the others cannot
    reach fails soon.
    """
    if local < size:
        store.wait([_ALL_HERE], PATIENCE)
    kind = device.partition(":")[0]
    backend = "cpu:gloo,cuda:gloo" if kind == "cuda" and shares_device() else BACKENDS[kind]
    timeout = MEETING if local < size else PATIENCE
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if local < size:
        dist.distributed_c10d._set_pg_timeout(PATIENCE)
        store.set_timeout(PATIENCE)
    mark_as_of_llm(local)


def local_environment() -> dict[str, str]:
    """Makes gloo listen on this machine only, unless the user has set an interface."""
    return {} if _INTERFACE in os.environ else {_INTERFACE: _LOOPBACK}


def of_others(error: BaseException) -> bool:
    """Whether a collective may raise this error because another rank has ended."""
    text = str(error)
    return isinstance(error, dist.DistError | torch.AcceleratorError) or "gloo" in text or "NCCL" in text


def free() -> None:
    """Abort collectives of this process that wait for ended ranks. gloo's end by themselves."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()


def leave() -> None:
    """Leave a world whose other ranks have ended."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # the others have ended
            free()
            if dist.is_initialized():
                dist.destroy_process_group()
