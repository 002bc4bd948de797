"""Memory budgets for offload, computed in bytes from the config and this machine."""

import math
import os
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outpace.config import InferenceConfig, LLMConfig
from outpace.errors import ConfigError
from outpace.log import size_text
from outpace.offload.store_memory import free_memory
from outpace.offload.units import Form

GIB = 1 << 30
HOST_FRACTION = 0.8  # default share of free host memory
SLOTS = 2  # one layer is computed while the next one is loaded
EXPERTS_FRACTION = 0.25  # default share of the device memory for layers that caches experts
BUFFERS = 3  # buffers in host memory for layers that are read from a file for a GPU


@dataclass(frozen=True)
class Layers:
    """Sizes of the layers of a model, before they are placed."""

    forms: tuple[Form, ...]
    """The layout of each layer as a unit."""
    values: int
    """Number of parameters in all layers."""
    others: int
    """Bytes of weights that always stay on the device."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(form.nbytes for form in self.forms)

    @property
    def experts(self) -> int:
        return self.total - sum(form.dense for form in self.forms)

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Room:
    """Bytes that layers may use in each place."""

    device: int
    """Including the slots."""
    host: int
    disk: int | None
    """None: no folder was given."""
    slots: int
    buffers: int
    """Number of buffers in host memory for layers that are read from a file for a GPU; one is for experts, if any."""
    experts: int = 0
    """More bytes on the device, for the cache of experts."""


def folder(config: InferenceConfig) -> Path | None:
    """The folder for files of layers; None: none was given."""
    named = config.zero.offload_param.nvme_path if config.zero.stage == 3 else config.offload.nvme
    if named is None:
        return None
    path, field = Path(named), "zero.offload_param.nvme_path" if config.zero.stage == 3 else "offload.nvme"
    try:
        made = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:  # not made here: behind a mistyped name or an unmounted drive is another disk
        raise ConfigError(f"{field}: {path} cannot be used ({error.strerror}); make the folder first") from None
    if not made:
        raise ConfigError(f"{field}: {path} is not a folder; name a folder")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{field}: {path} is not writable; name another folder")
    return path


def pinned(config: InferenceConfig) -> bool:
    return config.zero.offload_param.pin_memory and config.device_type == "cuda"


def device_budget(config: InferenceConfig) -> int:
    """Bytes of device memory for everything; on a CPU, for weights only."""
    asked, device = config.offload.device_memory, config.torch_device
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total if asked is None else _bytes(asked, total)
    total = torch.cuda.get_device_properties(device).total_memory
    share = config.cache.gpu_memory_utilization if isinstance(config, LLMConfig) else 0.9
    return _bytes(share if asked is None else asked, total)


def room_for(config: InferenceConfig, layers: Layers, reserved: int, *, ranks: int = 1, stored: int = 0) -> Room:
    """The room that the config leaves for layers of this rank.

    reserved: device bytes for pages and steps. ranks: number of ranks that share host memory and disk, including this
    one. stored: bytes of the file with the same weights that an earlier start wrote.
    """
    path = folder(config)
    disk = None if path is None else shutil.disk_usage(path).free // ranks + stored
    if config.zero.stage == 3:
        return _zero_room(config, layers, disk, ranks)
    offload = config.offload
    slots = offload.slots or SLOTS
    device = device_budget(config) - layers.others - reserved
    if config.device_type == "cuda" and offload.device_memory is None:
        device = min(device, torch.cuda.mem_get_info(config.torch_device)[0] - layers.others - reserved)
    most = device
    if (least := int(offload.cpu_offload_gb * GIB)) > 0:
        most = max(0, layers.total - least) + slots * layers.largest
    host = _bytes(HOST_FRACTION if offload.host_memory is None else offload.host_memory, _free()) // ranks
    buffers = BUFFERS + bool(layers.experts) if config.device_type == "cuda" else 0
    room = Room(min(device, most), host, disk, slots, buffers)
    return _with_experts(config, layers, room, device)


def _with_experts(config: InferenceConfig, layers: Layers, room: Room, device: int) -> Room:
    """Set device memory aside for the cache of experts. device: all device bytes for layers."""
    asked, left = config.offload.expert_cache, device - room.slots * layers.largest
    if asked is not None and not layers.experts:
        raise ConfigError("offload.expert_cache: no layer of this model has fused experts; remove it")
    if layers.total <= room.device or not layers.experts:
        return room
    if asked is None:
        experts = max(0, min(int(device * EXPERTS_FRACTION), left, layers.experts))
    else:
        experts = min(_bytes(asked, device_budget(config)), layers.experts)
    if asked is not None and experts > left:
        raise ConfigError(
            f"offload.expert_cache: {size_text(experts)} requested, but {room.slots} slots for streamed layers leave "
            f"{size_text(max(0, left))}; give less, or raise offload.device_memory"
        )
    return replace(room, device=min(room.device, device - experts), experts=experts)


def _zero_room(config: InferenceConfig, layers: Layers, disk: int | None, ranks: int = 1) -> Room:
    """The room by DeepSpeed's options, which count parameters. With prefetch at least two layers are on the device."""
    zero, param = config.zero, config.zero.offload_param
    per_value, largest = layers.total / max(1, layers.values), layers.largest
    ahead = (
        0 if zero.prefetch_bucket_size == 0 else max(1, min(3, int(zero.prefetch_bucket_size * per_value) // largest))
    )
    slots = 1 + ahead
    live = int(zero.max_live_parameters * per_value) if layers.values <= zero.max_reuse_distance else 0
    buffers = 0
    host = int(_free() * HOST_FRACTION) // ranks
    if param.device == "nvme":
        if config.device_type == "cuda":
            wanted = math.ceil(param.buffer_count * param.buffer_size * per_value / largest)
            buffers = max(2, min(wanted, len(layers.sizes) // 2)) + bool(layers.experts)
        host = min(host, int(param.max_in_cpu * per_value) + buffers * largest)
    room = Room(max(live, slots * largest), host, disk if param.device == "nvme" else None, slots, buffers)
    return _with_experts(config, layers, room, room.device)


def _free() -> int:
    known = free_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known is None else known


def _bytes(asked: float, of: int) -> int:
    """A number of bytes, or a fraction of `of`."""
    return int(asked * of) if isinstance(asked, float) else asked
