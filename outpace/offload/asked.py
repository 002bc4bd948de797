"""What a config asks for of offload, in bytes of this machine."""

import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outpace.config import InferenceConfig, LLMConfig
from outpace.errors import ConfigError
from outpace.log import size_text
from outpace.offload.store import free_memory
from outpace.offload.units import Form

GIB = 1 << 30
HOST_FRACTION = 0.8  # of free memory, unless told otherwise
SLOTS = 2  # one layer is computed while another one comes
EXPERTS_FRACTION = 0.25  # of what the device has for layers, unless told otherwise: for experts that were used last
BUFFERS = 3  # in host memory, for layers on their way from a file to a GPU


@dataclass(frozen=True)
class Layers:
    """What is known of the layers of a model before they are placed."""

    forms: tuple[Form, ...]
    """Each as a unit."""
    values: int
    """Weights in all of them, however many bits each has."""
    others: int
    """Bytes of what stays on the device in any case."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each."""
        return tuple(form.nbytes for form in self.forms)

    @property
    def experts(self) -> int:
        """Bytes of all their experts."""
        return self.total - sum(form.dense for form in self.forms)

    @property
    def largest(self) -> int:
        """Bytes of the largest."""
        return max(self.sizes)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Room:
    """Bytes that layers may take."""

    device: int
    """Slots included."""
    host: int
    disk: int | None
    """None: no folder was named."""
    slots: int
    buffers: int
    """Layers in host memory on their way from a file to a GPU; one of them for experts, if there are any."""
    experts: int = 0
    """Of the device beside those, for experts that were used last."""


def folder(config: InferenceConfig) -> Path | None:
    """Where files of layers go."""
    named = config.zero.offload_param.nvme_path if config.zero.stage == 3 else config.offload.nvme
    if named is None:
        return None
    path, field = Path(named), "zero.offload_param.nvme_path" if config.zero.stage == 3 else "offload.nvme"
    try:
        path.mkdir(exist_ok=True)  # the one above must be there: a drive that is not mounted is not made up for
    except OSError as error:
        raise ConfigError(f"{field}: cannot make the folder {path} ({error.strerror}); name another one") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{field}: {path} is not writable; name another folder")
    return path


def pinned(config: InferenceConfig) -> bool:
    """Whether host memory is page-locked."""
    return config.zero.offload_param.pin_memory and config.device_type == "cuda"


def device_budget(config: InferenceConfig) -> int:
    """Bytes of the device that everything may take; on a CPU, those of weights."""
    asked, device = config.offload.device_memory, config.torch_device
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total if asked is None else _bytes(asked, total)
    total = torch.cuda.get_device_properties(device).total_memory
    share = config.cache.gpu_memory_utilization if isinstance(config, LLMConfig) else 0.9
    return _bytes(share if asked is None else asked, total)


def room_for(config: InferenceConfig, layers: Layers, reserved: int, *, ranks: int = 1, stored: int = 0) -> Room:
    """What the config leaves for layers of this rank.

    reserved: bytes of the device for pages and steps. ranks: those that share host memory and disk with this one, it
    included. stored: bytes of the file that another start has left for the same weights.
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
    """The same with some of the device for experts that were used last. device: what all of it has for layers."""
    asked, left = config.offload.expert_cache, device - room.slots * layers.largest
    if asked is not None and not layers.experts:
        raise ConfigError("offload.expert_cache: no layer of this model has fused experts; leave it out")
    if layers.total <= room.device or not layers.experts:
        return room
    if asked is None:
        experts = max(0, min(int(device * EXPERTS_FRACTION), left, layers.experts))
    else:
        experts = min(_bytes(asked, device_budget(config)), layers.experts)
    if asked is not None and experts > left:
        raise ConfigError(
            f"offload.expert_cache: {size_text(experts)} wanted, and beside {room.slots} slots for streamed layers "
            f"{size_text(max(0, left))} are left; give less, or raise offload.device_memory"
        )
    return replace(room, device=min(room.device, device - experts), experts=experts)


def _zero_room(config: InferenceConfig, layers: Layers, disk: int | None, ranks: int = 1) -> Room:
    """DeepSpeed counts values. If anything is fetched ahead, two layers at least are on the device at a time."""
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
    """Bytes of host memory that are free."""
    known = free_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known is None else known


def _bytes(asked: float, of: int) -> int:
    """Bytes, or a fraction of so many."""
    return int(asked * of) if isinstance(asked, float) else asked
