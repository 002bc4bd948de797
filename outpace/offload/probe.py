"""Measures the rates of this machine (device, link, disk) once and stores them in a file."""

import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from outpace.kernels.limits import device_name, link_bandwidth, measure_speed
from outpace.log import chosen, logger
from outpace.offload.disk import measure_disk
from outpace.offload.numbers import Rates
from outpace.offload.store_read import ReadOptions

DISK_BYTES = 1 << 30
"""Bytes that are written and read to measure a disk."""


@dataclass(frozen=True)
class Probe:
    """The rates of a device, its machine, and a folder for layers on disk."""

    device: str
    host: str
    folder: str | None
    date: str
    bandwidth: float
    """Bytes per second that the device reads from its memory."""
    flops: float
    """Operations per second of a large product, in bf16 on a GPU, in fp32 on a CPU."""
    link: float
    """Bytes per second from page-locked host memory to the device; on a CPU, of a copy in memory."""
    disk: float | None
    """Bytes per second read from the folder's disk; None: no folder was given."""

    @property
    def rates(self) -> Rates:
        """The rates for the planner; a CPU has no link."""
        return Rates(self.bandwidth, self.flops, None if self.device.startswith("cpu") else self.link, self.disk)


def probe(device: torch.device, folder: Path | None, cache: Path, *, again: bool = False) -> Probe:
    """The rates from `cache`, or measured now in about 2 s. again: measure even if the cache has them."""
    place = None if folder is None else folder.absolute()
    file = _file(device_name(device), platform.node(), place, cache)
    found = None if again else _read(file)
    if found is None:
        found = measure(device, place)
        _write(file, found)
    else:
        chosen("rates", found.rates, f"measured {found.date}, stored in {file}")
    return found


def measure(device: torch.device, folder: Path | None, disk_bytes: int = DISK_BYTES) -> Probe:
    """Measure a device and the disk of a folder."""
    disk = None if folder is None else measure_disk(folder, disk_bytes, threads=ReadOptions().threads)
    speed = measure_speed(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    link = link_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Probe(
        device=device_name(device),
        host=platform.node(),
        folder=None if folder is None else str(folder),
        date=time.strftime("%Y-%m-%d %H:%M"),
        bandwidth=speed.bandwidth,
        flops=speed.flops,
        link=link,
        disk=disk,
    )


def _file(device: str, host: str, folder: Path | None, cache: Path) -> Path:
    key = hashlib.sha256(json.dumps([device, host, str(folder or "")]).encode()).hexdigest()[:16]
    return cache / "rates" / f"{device}-{key}.json"


def _read(file: Path) -> Probe | None:
    """The rates in a file; None: there is no valid one."""
    try:
        found = Probe(**json.loads(file.read_text()))
        rates = (found.bandwidth, found.flops, found.link, 1.0 if found.disk is None else found.disk)
        return found if all(rate > 0 and math.isfinite(rate) for rate in rates) else None
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, found: Probe) -> None:
    """Store the rates, if possible; the file appears atomically."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(found), indent=1))
        partial.replace(file)
    except OSError as error:
        logger.warning(
            "rates: they cannot be stored in %s (%s) and will be measured again next time", file.parent, error
        )
