"""How ranks started by torchrun (or another launcher) find each other, or fail with one clear error."""

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from outpace.errors import ConfigError, EngineDead

SECONDS = "OUTPACE_JOIN_TIMEOUT"
"""Environment variable: seconds to wait for the other ranks."""
DEFAULT = 25.0
_HERE = "outpace/here"


def join(backend: str) -> None:
    """Join the world that the environment describes."""
    seconds = _seconds()
    store, rank, size = _met(seconds)
    store.set_timeout(dist.default_pg_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _met(seconds: float) -> tuple[Any, int, int]:
    """The store, once all ranks have joined it."""
    limit, store, size = timedelta(seconds=seconds), None, int(os.environ["WORLD_SIZE"])
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
        store.set(f"{_HERE}/{rank}", "")
        store.wait([f"{_HERE}/{number}" for number in range(size)], limit)
        return store, rank, size
    except (dist.DistError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise EngineDead(
            f"not all {size} ranks connected to {where} within {seconds:g} s{_missing(store, size)} ({first}); start "
            f"them with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or set a longer timeout with {SECONDS}"
        ) from None


def _missing(store: Any, size: int) -> str:
    with contextlib.suppress(dist.DistError, OSError):
        if store is not None:
            missing = [number for number in range(size) if not store.check([f"{_HERE}/{number}"])]
            return f", {missing} are missing"
    return ""


def _seconds() -> float:
    given = os.environ.get(SECONDS, str(DEFAULT))
    with contextlib.suppress(ValueError):
        if 0 < float(given) < float("inf"):
            return float(given)
    raise ConfigError(f"{SECONDS}: expected seconds, got {given!r}")
