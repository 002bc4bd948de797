"""Plans which layers of a model are streamed: their sizes, the room for them, and the key of their file."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from outpace._version import __version__
from outpace.config import InferenceConfig, LLMConfig
from outpace.config.rules import places_weights
from outpace.errors import ConfigError, OffloadError
from outpace.inject.recipe import Recipe
from outpace.loading.inspect import text_config
from outpace.loading.targets import Before, Target, targets
from outpace.loading.weights import Extent, Source
from outpace.log import chosen
from outpace.offload.asked import Layers, Room, folder, pinned, room_for
from outpace.offload.place import Placement, spread
from outpace.offload.store_read import ReadOptions, stored_size
from outpace.offload.streaming import Folder, Streaming
from outpace.offload.units import Form, experts_of, find_layers, is_stacked, layer_of
from outpace.parallel.mesh import Mesh, on_all

Result = TypeVar("Result")
CONTEXT = 1 << 30  # device memory of CUDA and its libraries
TOKENS = 8192  # default tokens of a step
REQUEST = 1024  # tokens of a request for which pages are reserved, unless requests are shorter
FEW = 8  # assumed sequences of a `generate` call


def plan_streaming(
    model: nn.Module,
    before: Before,
    config: InferenceConfig,
    device: torch.device,
    sources: Mapping[str, Source] | None,
    mesh: Mesh,
) -> Streaming | None:
    """Decide which layers are streamed, and from where; None: all layers stay on the device."""
    if not places_weights(config):
        return None
    found = find_layers(model)
    if not found:
        raise ConfigError(
            f"{_field(config)}: {type(model).__name__} has no list of layers (nn.ModuleList, nn.Sequential) that could "
            "be streamed; remove it"
        )
    every = targets(model, before)
    stay = _staying(every, config)
    parts = _by_layer(every, found, stay)
    if len(parts) == 1:
        _on_every_rank(lambda: folder(config), config, mesh, device)  # checked although nothing is put there
        chosen("layers", f"all {len(found)} on {device}", "their parameters are below zero's threshold for streaming")
        return None
    found = [layer for number, layer in enumerate(found) if number in parts]
    layers = _layers(parts, found)
    reserved = _reserved(model, config, before) if device.type == "cuda" else 0
    key = None if sources is None else _key(sources, every, mesh, device)
    room = _room(config, layers, reserved, key, mesh, device)
    placement = _placed(layers, room, mesh, device)
    if not placement.slots:
        chosen("layers", f"all {len(found)} on {device}", "they fit")
        return None
    files = _folder(config, key, room)
    locked = pinned(config)
    return Streaming(
        found, layers.forms, placement, device, pinned=locked, folder=files, stay=stay, for_experts=room.experts
    )


def _room(
    config: InferenceConfig, layers: Layers, reserved: int, key: str | None, mesh: Mesh, device: torch.device
) -> Room:
    """The memory for layers."""

    def find() -> Room:
        path = folder(config)
        stored = 0 if path is None or key is None else stored_size(path, key)
        return room_for(config, layers, reserved, ranks=mesh.local, stored=stored)

    return _on_every_rank(find, config, mesh, device)


def _on_every_rank(find: Callable[[], Result], config: InferenceConfig, mesh: Mesh, device: torch.device) -> Result:
    """What `find` returns; if it fails on one rank, all ranks fail."""
    elsewhere = OffloadError(f"{_field(config)}: another rank cannot place its layers; see the error of that rank")
    return on_all(find, lambda good: mesh.everywhere(good, device), elsewhere)


def _placed(layers: Layers, room: Room, mesh: Mesh, device: torch.device) -> Placement:
    """The same placement on all ranks, since they run steps together."""
    least = [mesh.least(value, device) for value in (room.device, room.host)]
    disk = None if room.disk is None else mesh.least(room.disk, device)
    return spread(layers.sizes, least[0], least[1], disk, room.slots, staging=room.buffers)


def _staying(every: list[Target], config: InferenceConfig) -> frozenset[Recipe]:
    """Weights that stay because they are below ZeRO's thresholds."""
    if config.zero.stage != 3:
        return frozenset()
    left, stay = config.zero.model_persistence_threshold, set()
    for target in every:
        values = torch.Size(target.recipe.shape).numel()
        if values < config.zero.param_persistence_threshold and values <= left:
            left -= values
            stay.add(target.recipe)
    return frozenset(stay)


def _by_layer(
    every: list[Target], found: list[tuple[str, nn.Module]], stay: frozenset[Recipe]
) -> dict[int | None, list[Target]]:
    """Index of a layer -> its weights; None: weights that do not belong to exactly one layer."""
    of = layer_of([layer for _, layer in found])
    parts: dict[int | None, list[Target]] = {None: []}
    for target in every:
        numbers = {of.get(id(module)) for module, _ in target.owners}
        number = numbers.pop() if len(numbers) == 1 and target.recipe not in stay else None
        parts.setdefault(number, []).append(target)
    return parts


def _layers(parts: Mapping[int | None, list[Target]], found: list[tuple[str, nn.Module]]) -> Layers:
    """Sizes of layers. found: the layers that have weights to stream."""
    own = [part for number, part in sorted(parts.items(), key=lambda item: item[0] or 0) if number is not None]
    forms = tuple(_form(part, layer) for part, (_, layer) in zip(own, found, strict=True))
    values = sum(torch.Size(target.recipe.shape).numel() for part in own for target in part)
    return Layers(forms, values, sum(size for target in parts[None] for _, size in _kept(target)))


def _form(part: list[Target], layer: nn.Module) -> Form:
    """The layout of a layer's weights as a unit."""
    experts = experts_of(layer)
    stacked = [
        (experts is not None and target.owners[0][0] is experts and is_stacked(experts, shape), size)
        for target in part
        for shape, size in _kept(target)
    ]
    dense, stacks = ([size for is_one, size in stacked if is_one == wanted] for wanted in (False, True))
    return Form.of(dense, stacks, 0 if experts is None else experts.num_experts)


def _kept(target: Target) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes) of the tensors of a weight in the running model."""
    return [(shape, torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in target.kept.values()]


def _reserved(model: nn.Module, config: InferenceConfig, before: Before) -> int:
    """Estimated GPU bytes for steps and pages, before anything can be measured."""
    text = text_config(model)
    hidden = int(getattr(text, "hidden_size", 0) or 4096)
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    heads = int(getattr(text, "num_attention_heads", 0) or 32)
    kv_heads = int(getattr(text, "num_key_value_heads", 0) or heads)
    head_dim = int(getattr(text, "head_dim", 0) or hidden // heads)
    count = int(getattr(text, "num_hidden_layers", 0) or 32)
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    size = max((dtype.itemsize for dtype in before.dtypes.values()), default=2)
    if isinstance(config, LLMConfig):
        tokens, seqs = config.scheduler.max_num_batched_tokens or TOKENS, config.scheduler.max_num_seqs
        blocks = config.cache.num_blocks
        length = min(config.max_out_tokens or REQUEST, REQUEST)
        paged = seqs * length if blocks is None else blocks * config.cache.block_size
    else:
        tokens, seqs, paged = TOKENS, FEW, FEW * min(config.max_out_tokens, REQUEST)
    step = tokens * (2 * inner + 6 * hidden) * size + seqs * vocabulary * (size + 16)
    return CONTEXT + step + paged * 2 * kv_heads * head_dim * count * min(size, 2)


def _folder(config: InferenceConfig, key: str | None, room: Room) -> Folder | None:
    path = folder(config)
    if path is None:
        return None
    aio = config.zero.aio
    reads = ReadOptions.of_aio(aio.thread_count, aio.block_size, aio.queue_depth)
    return Folder(path, key, reads, room.buffers)


def _key(sources: Mapping[str, Source], every: list[Target], mesh: Mesh, device: torch.device) -> str | None:
    """A key that identifies a model's weights as they run; None: their sources have no file name."""
    ranks = [f"{group.rank} of {group.size}" for group in (mesh.tp, mesh.ep, mesh.expert_tp)]
    digest = hashlib.sha256(f"{__version__} {device.type} {', '.join(ranks)}".encode())
    seen: dict[Any, str] = {}
    for name, source in sorted(sources.items()):
        for piece in source.pieces:
            if not isinstance(piece.place, Extent):
                return None
            path = piece.place.path
            if path not in seen:
                stat = path.stat()
                seen[path] = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
            digest.update(f"{name} {seen[path]} {piece}".encode())
    for target in every:
        digest.update(f"{target.recipe} {target.dtype}".encode())
    return digest.hexdigest()


def _field(config: InferenceConfig) -> str:
    return "zero" if config.zero.stage == 3 else "offload"
