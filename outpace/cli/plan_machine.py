"""The machine that `outpace plan` plans for: a common GPU, or this machine."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from outpace.config.values import Size
from outpace.errors import ConfigError
from outpace.log import size_text
from outpace.offload.cards import CARDS, DISK, card_with
from outpace.offload.numbers import Budgets, Rates

if TYPE_CHECKING:
    import torch

DEVICE_PART = 0.9
"""Default share of a device's memory."""
HOST_PART = 0.8
"""Default share of free host memory."""

ANY = 1 << 60
"""Bytes of a disk that is not on this machine."""


@dataclass(frozen=True)
class Machine:
    """Budgets and rates, and where they come from."""

    name: str
    budgets: Budgets
    rates: Rates
    source: str
    """Where the rates come from."""
    fp8: bool = False
    """Whether the device multiplies in fp8."""

    @property
    def data(self) -> dict[str, object]:
        """All values, for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """All values as lines of text."""
        budgets, rates = self.budgets, self.rates
        rooms = [f"device {size_text(budgets.device)}"]
        if rates.link is not None:
            rooms.append(f"host {size_text(budgets.host)}")
        if budgets.disk is not None:
            rooms.append(f"disk {'as much as it takes' if budgets.disk == ANY else size_text(budgets.disk)}")
        speeds = [f"device {size_text(rates.bandwidth)}/s and {rates.flops / 1e12:.3g} TFLOP/s"]
        speeds += [f"{name} {size_text(rate)}/s" for name, rate in (("link", rates.link), ("disk", rates.disk)) if rate]
        yield f"room: {', '.join(rooms)}"
        yield f"rates: {', '.join(speeds)} ({self.source})"


def machine(
    gpu: str | None,
    gpu_memory: str | None,
    ram: str | None,
    nvme: Path | None,
    *,
    link_gbs: float | None = None,
    disk_gbs: float | None = None,
    device_gbs: float | None = None,
    tflops: float | None = None,
) -> Machine:
    """The named device; else this machine's GPU; else a common GPU of the given size; else this CPU."""
    memory, host = _bytes("gpu-memory", gpu_memory), _bytes("ram", ram)
    rates = {"link": _rate("link-gbs", link_gbs, 1e9), "disk": _rate("disk-gbs", disk_gbs, 1e9),
             "bandwidth": _rate("device-gbs", device_gbs, 1e9), "flops": _rate("tflops", tflops, 1e12)}  # fmt: skip
    if gpu is not None and gpu != "cpu" and gpu not in CARDS:
        raise ConfigError(f"gpu: {gpu!r} is not one of {', '.join(CARDS)} and cpu; name one, and correct its rates")
    found = _usual(gpu, memory, nvme, disk_gbs) if _is_usual(gpu, memory) else _here(gpu, nvme)
    room, is_cpu = found.budgets, found.rates.link is None
    if is_cpu and (memory is not None or link_gbs is not None):
        raise ConfigError("gpu: a CPU has neither --gpu-memory nor --link-gbs; give --ram, or name another --gpu")
    device = memory if memory is not None else room.device
    if is_cpu:
        device, host = (host if host is not None else room.device), 0
    return replace(
        found,
        budgets=Budgets(device, host if host is not None else room.host, room.disk),
        rates=replace(found.rates, **{name: rate for name, rate in rates.items() if rate is not None}),
    )


def _is_usual(gpu: str | None, memory: int | None) -> bool:
    if gpu is not None:
        return gpu != "cpu"

    import torch

    return memory is not None and not torch.cuda.is_available()


def _usual(gpu: str | None, memory: int | None, nvme: Path | None, disk_gbs: float | None) -> Machine:
    """A GPU of the table with this machine's host memory, and its disk if the folder is here."""
    name = gpu or card_with(memory or 0)
    card = CARDS[name]
    source = f"typical of a {name}" + ("" if gpu else ", the first of its size; --gpu names another")
    here = nvme is not None and nvme.is_dir()
    disk = None if nvme is None else shutil.disk_usage(nvme).free if here else ANY
    rates = replace(card.rates, disk=None if nvme is None else DISK)
    if here and disk_gbs is None:
        rates, source = replace(rates, disk=_probed("cpu", nvme).disk), f"{source}; the disk as measured here"
    room = Budgets(int(DEVICE_PART * card.memory), _free("host", "cpu"), disk)
    return Machine(name, room, rates, source, card.fp8)


def _here(gpu: str | None, nvme: Path | None) -> Machine:
    from outpace.cli.probe import check_folder, device_of

    check_folder(nvme)
    device = device_of(gpu)
    disk = None if nvme is None else shutil.disk_usage(nvme).free
    room = _free("device", str(device)) if device.type == "cuda" else _free("host", "cpu")
    host = _free("host", "cpu") if device.type == "cuda" else 0
    name = "this GPU" if device.type == "cuda" else "this CPU"
    return Machine(name, Budgets(room, host, disk), _probed(str(device), nvme), "measured here", _has_fp8(device))


def _has_fp8(device: "torch.device") -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _probed(device: str, nvme: Path | None) -> Rates:
    import torch

    from outpace.loading.cache import cache_dir
    from outpace.offload.probe import probe

    return probe(torch.device(device), nvme, cache_dir()).rates


def _free(place: str, device: str) -> int:
    """The part of the free memory to plan with."""
    import torch

    from outpace.cli.probe import free

    size = free(torch.device(device), None)[place]
    if size is None:
        raise ConfigError("ram: cannot find out how much memory is free on this system; give --ram")
    return int((DEVICE_PART if place == "device" else HOST_PART) * size)


def _bytes(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return TypeAdapter(Size).validate_python(text)
    except ValidationError:
        raise ConfigError(f"{flag}: {text!r} is not a size; write it as 24GB, 3.5GiB or 500MB") from None


def _rate(flag: str, given: float | None, unit: float) -> float | None:
    if given is None:
        return None
    if not 0 < given < float("inf"):
        raise ConfigError(f"{flag}: expected a number above 0, got {given}")
    return given * unit
