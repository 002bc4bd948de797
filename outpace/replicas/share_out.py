"""Divides the machine among replicas: its GPUs, or its CPU cores."""

import ctypes
import os
from collections.abc import Mapping, Sequence

from outpace.config import AskedConfig
from outpace.config.rules import num_ranks
from outpace.errors import ConfigError
from outpace.runner.machine import cores
from outpace.server.child import import_path

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
SHARE = "OUTPACE_RANKS_SHARE_DEVICE"
"""If this environment variable is set, all replicas use the same GPUs: for tests on a machine that has one."""


def num_gpus() -> int:
    """Number of GPUs that a new process would see. The driver is asked, because torch is not imported here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if not driver.cuInit(0) and not driver.cuDeviceGetCount(ctypes.byref(count)) else 0


def environments(
    count: int, ranks: int, device: str | None, gpus: int, cores: int, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each replica. ranks: GPU processes of each; device: the option."""
    if device is not None and ":" in device:
        raise ConfigError(
            f"device: {device!r} is one device, and there are {count} replicas; give {device.partition(':')[0]!r}, and "
            f"choose GPUs by {VISIBLE}"
        )
    if device == "cpu" or not gpus:
        threads = environment.get(THREADS) or str(max(1, cores // (count * ranks)))
        return [{**environment, THREADS: threads} for _ in range(count)]
    if environment.get(SHARE):
        return [dict(environment) for _ in range(count)]
    if gpus < count * ranks:
        raise ConfigError(
            f"replicas: {count} replicas of {ranks} GPU{'s' * (ranks > 1)} each need {count * ranks}, and there are "
            f"{gpus}; ask for fewer, or give --device cpu"
        )
    names = _names(environment, gpus)
    return [
        {**environment, VISIBLE: ",".join(names[first : first + ranks])} for first in range(0, count * ranks, ranks)
    ]


def _names(environment: Mapping[str, str], gpus: int) -> Sequence[str]:
    """The names of the GPUs that may be used: those of the user, or their numbers."""
    given = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return given[:gpus] if len(given) >= gpus else [str(number) for number in range(gpus)]


def for_replicas(asked: AskedConfig, count: int) -> list[dict[str, str]]:
    """The environment of each replica on this machine."""
    gpus = 0 if asked.device_type == "cpu" else num_gpus()
    environment = {**os.environ, "PYTHONPATH": import_path()}
    return environments(count, num_ranks(asked), asked.device, gpus, cores(), environment)
