"""The world of torch.distributed that started ranks join: on this machine alone, gone when its ranks are."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from outpace.errors import ConfigError, StateError
from outpace.parallel.mesh import BACKENDS, STARTED_BY, mark_as_of_llm

HOST = "127.0.0.1"
SHARE = "OUTPACE_RANKS_SHARE_DEVICE"
"""Set in the environment, all ranks use the first GPU, and gloo: for tests on a machine that has one."""
PATIENCE = timedelta(minutes=30)  # of a collective: a rank may still be reading weights, or compiling kernels
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LOCAL_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": _LOOPBACK}
"""Has gloo listen on this machine alone."""


def check_world(size: int, device: str | None, device_type: str) -> None:
    """Refuse what cannot become a world of so many ranks on this machine, before any of them is started."""
    if all(name in os.environ for name in STARTED_BY):
        raise ConfigError(
            f"tensor_parallel_size: {size} ranks, but torchrun has started this process as one of several; LLM and "
            "outpace serve start their ranks themselves: run the script without torchrun, or use init_inference"
        )
    if dist.is_initialized():
        raise StateError(
            "tensor_parallel_size: this process is in a world of torch.distributed already (another LLM with several "
            "ranks, or your own); shut that one down first, or make this LLM in another process"
        )
    if device_type != "cuda":
        return
    if device is not None and ":" in device:
        raise ConfigError(
            f"device: {device!r} is one GPU, and there are {size} ranks; give 'cuda', and choose GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if count < size and not shares_device():
        raise ConfigError(f"tensor_parallel_size: {size} ranks need a GPU each, and there are {count}; ask for fewer")


def shares_device() -> bool:
    """Whether all ranks use one GPU."""
    return bool(os.environ.get(SHARE))


def device_of(rank: int, device_type: str) -> str:
    """Where a rank runs."""
    return "cpu" if device_type == "cpu" else f"cuda:{0 if shares_device() else rank}"


def listening_socket() -> socket.socket:
    """Where the store of a new world will listen."""
    return socket.create_server((HOST, 0), backlog=1024)


def meet(size: int, port: int, listening: int | None = None, patience: timedelta = PATIENCE) -> TCPStore:
    """The store of a world, at this port; one rank keeps it, and must have it before others ask for it.

    That is not the first rank: whoever waits at a store whose rank has ended is told so at once, and the first one,
    which may be somebody's own process, must not be left waiting.
    """
    keeps = listening is not None
    store = TCPStore(HOST, port, size, keeps, patience, wait_for_workers=False, master_listen_fd=listening)
    store.set_timeout(PATIENCE)
    return store


def join(store: TCPStore, rank: int, size: int, device: str) -> None:
    """Become a rank of a world."""
    kind = device.partition(":")[0]
    backend = "cpu:gloo,cuda:gloo" if kind == "cuda" and shares_device() else BACKENDS[kind]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    mark_as_of_llm()


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Groups that are made inside listen on this machine alone."""
    added = {name: value for name, value in LOCAL_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def of_others(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank has ended, or may be."""
    text = str(error)
    return isinstance(error, dist.DistError | torch.AcceleratorError) or "gloo" in text or "NCCL" in text


def free() -> None:
    """Have collectives of this process end that wait for ranks that are gone. gloo's end by themselves."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()


def leave() -> None:
    """End this process's part in a world whose other ranks have ended."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # there is nobody to tell
            free()
            if dist.is_initialized():
                dist.destroy_process_group()
