"""The world of torch.distributed that started ranks join: on the interface asked for, gone when its ranks are."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
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
MEETING = timedelta(seconds=20)  # for ranks of several machines that are all there to connect with each other
_ALL_HERE = "outpace/all ranks are here"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LOCAL_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": _LOOPBACK}


_FIELDS = "tensor_parallel_size, pipeline_parallel_size"


def check_world(size: int, device: str | None, device_type: str, local: int) -> None:
    """Refuse what cannot become a world of so many ranks, before any of them is started. local: on this machine."""
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
        return
    if device is not None and ":" in device:
        raise ConfigError(
            f"device: {device!r} is one GPU, and there are {size} ranks; give 'cuda', and choose GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if count < local and not shares_device():
        raise ConfigError(f"{_FIELDS}: {local} ranks need a GPU each, and there are {count}; ask for fewer")


def shares_device() -> bool:
    """Whether all ranks use one GPU."""
    return bool(os.environ.get(SHARE))


def device_of(rank: int, device_type: str, local: int) -> str:
    """Where a rank runs. local: ranks on each machine."""
    return "cpu" if device_type == "cpu" else f"cuda:{0 if shares_device() else rank % local}"


def listening_socket() -> socket.socket:
    """Where the store of a new world will listen."""
    return socket.create_server((HOST, 0), backlog=1024)


def meet(
    size: int, port: int, listening: int | None = None, patience: timedelta = PATIENCE, host: str = HOST
) -> TCPStore:
    """The store of a world, at this port; one rank keeps it, and must have it before others ask for it.

    On one machine that is not the first rank: whoever waits at a store whose rank has ended is told so at once, and the
    first one, which may be somebody's own process, must not be left waiting. Of several machines it is the first one:
    its own connection to the store is cut when others are lost (see `leader`).
    """
    keeps = listening is not None
    store = TCPStore(host, port, size, keeps, patience, wait_for_workers=False, master_listen_fd=listening)
    store.set_timeout(PATIENCE)
    return store


def all_here(store: TCPStore) -> None:
    """Say that all ranks of several machines have found the store."""
    store.set(_ALL_HERE, "")


def join(store: TCPStore, rank: int, size: int, device: str, local: int) -> None:
    """Become a rank of a world of which so many are on this machine.

    Ranks of several machines first wait until all have found the store. Then a machine that others cannot connect to
    is an error soon.
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
    """Has gloo listen on this machine alone, unless the user says otherwise."""
    return {name: value for name, value in LOCAL_ENVIRONMENT.items() if name not in os.environ}


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Groups that are made inside listen where these variables say."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
