"""Decides which layers live on the device, in host memory, or on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from outpace.errors import ConfigError
from outpace.log import size_text

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """The place of each layer, and the number of slots on the device for streamed layers."""

    tiers: tuple[Tier, ...]
    slots: int
    """Each slot is as large as the largest streamed layer. 0: all layers stay on the device."""

    def device_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of layers that stay on the device, and of the slots."""
        streamed = [size for size, tier in zip(sizes, self.tiers, strict=True) if tier != "device"]
        return sum(sizes) - sum(streamed) + self.slots * max(streamed, default=0)

    def tier_bytes(self, sizes: Sequence[int], tier: Tier) -> int:
        return sum(size for size, place in zip(sizes, self.tiers, strict=True) if place == tier)


def spread(
    sizes: Sequence[int], device_bytes: int, host_bytes: int, disk_bytes: int | None, slots: int, *, staging: int = 0
) -> Placement:
    """Place layers so that as few bytes as possible are streamed, and as few of those as possible come from disk.

    Streamed layers are spread evenly, starting with the first layer; those on disk are spread evenly among them.
    disk_bytes: None without a disk. staging: number of host buffers for layers on disk, each as large as the largest.
    """
    return next(placements(sizes, device_bytes, host_bytes, disk_bytes, slots, staging=staging))


def placements(
    sizes: Sequence[int], device_bytes: int, host_bytes: int, disk_bytes: int | None, slots: int, *, staging: int = 0
) -> Iterator[Placement]:
    """The placement of `spread`, then those that stream more bytes in total but fewer from disk (if sizes differ)."""
    if not sizes or min(sizes) < 1 or slots < 1:
        raise ConfigError("offload: expected layers of at least a byte, and at least one slot")
    if sum(sizes) <= device_bytes:
        yield Placement(everywhere("device", len(sizes)), 0)
        return
    fitting = [places for places in _patterns(len(sizes)) if _need(sizes, places, slots) <= device_bytes]
    if not fitting:
        raise _too_small(sizes, device_bytes, slots)
    least: int | None = None
    for places in sorted(fitting, key=lambda places: _sum(sizes, places)):
        if least is not None and _sum(sizes, places) - host_bytes >= least:
            break
        streamed = [sizes[place] for place in places]
        on_disk = _on_disk(streamed, host_bytes, disk_bytes, staging)
        if on_disk is not None and (least is None or _sum(streamed, on_disk) < least):
            least = _sum(streamed, on_disk)
            yield Placement(_tiers(len(sizes), places, on_disk), slots)
            if not least:
                break
    if least is None:
        raise _no_room(sizes, fitting, host_bytes, disk_bytes, staging)


def everywhere(tier: Tier, layers: int) -> tuple[Tier, ...]:
    return (tier,) * layers


def _tiers(layers: int, streamed: Sequence[int], on_disk: Sequence[int]) -> tuple[Tier, ...]:
    tiers: list[Tier] = ["device"] * layers
    for place in streamed:
        tiers[place] = "host"
    for number in on_disk:
        tiers[streamed[number]] = "disk"
    return tuple(tiers)


def even(number: int, among: int) -> tuple[int, ...]:
    """`number` indices below `among`, as far apart as possible, the first one 0."""
    return tuple(index * among // number for index in range(number))


def _patterns(layers: int) -> Iterator[tuple[int, ...]]:
    return (even(number, layers) for number in range(1, layers + 1))


def _sum(sizes: Sequence[int], places: Sequence[int]) -> int:
    return sum(sizes[place] for place in places)


def _need(sizes: Sequence[int], streamed: Sequence[int], slots: int) -> int:
    return sum(sizes) - _sum(sizes, streamed) + slots * max(sizes[place] for place in streamed)


def _on_disk(sizes: list[int], host_bytes: int, disk_bytes: int | None, staging: int) -> tuple[int, ...] | None:
    """The streamed layers that go to disk, with as few bytes as possible; None: host memory and disk are too small."""
    total = sum(sizes)
    if total <= host_bytes:
        return ()
    if total > host_bytes + (disk_bytes or 0):
        return None
    found = [
        (_sum(sizes, places), places)
        for places in _patterns(len(sizes))
        if _sum(sizes, places) <= (disk_bytes or 0)
        and total - _sum(sizes, places) + staging * max(sizes[place] for place in places) <= host_bytes
    ]
    return min(found)[1] if found else None


def _too_small(sizes: Sequence[int], device_bytes: int, slots: int) -> ConfigError:
    least = min(_need(sizes, streamed, slots) for streamed in _patterns(len(sizes)))
    return ConfigError(
        f"offload.device_memory: {size_text(max(0, device_bytes))} are left for layers, and {slots} slots for "
        f"streamed layers need {size_text(least)} (the largest layer: {size_text(max(sizes))}); give "
        f"{size_text(least - device_bytes)} more, fewer or shorter requests, or smaller weights (int8, int4)"
    )


def _no_room(
    sizes: Sequence[int], fitting: list[tuple[int, ...]], host_bytes: int, disk_bytes: int | None, staging: int
) -> ConfigError:
    least = min(_sum(sizes, streamed) for streamed in fitting)
    missing = least - host_bytes - (disk_bytes or 0)
    if missing <= 0:  # there are enough bytes, but not for whole layers and their buffers
        missing = (staging + 1) * max(sizes)
    disk = "no folder for a disk is given" if disk_bytes is None else f"the disk takes {size_text(disk_bytes)}"
    remedy = "name a folder with offload.nvme" if disk_bytes is None else "free as much on the disk of offload.nvme"
    return ConfigError(
        f"offload: {size_text(least)} of {size_text(sum(sizes))} of layers do not fit on the device; host memory "
        f"takes {size_text(max(0, host_bytes))}, {disk}: {size_text(missing)} are missing; raise "
        f"offload.host_memory by as much, {remedy}, or use smaller weights (int8, int4)"
    )
