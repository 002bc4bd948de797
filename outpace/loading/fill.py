"""Fills a model with its weights: from a checkpoint, or for a live module from its own tensors."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.loading.jobs import Job, jobs
from outpace.loading.read_source import read
from outpace.loading.stored import StoredPart
from outpace.loading.stream import Advance, Group, stream
from outpace.loading.targets import Before, Target, parted, targets, write
from outpace.loading.weights import Source, first_place, stored_bytes
from outpace.log import size_text
from outpace.offload.streaming import Streaming


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a live model in place, one tensor at a time, ties kept (see `Before.of`)."""
    settle(model, Before.of(model, dtype))


def settle(model: nn.Module, before: Before, device: torch.device | None = None, away: Streaming | None = None) -> None:
    """Convert, fuse and move the weights of a live model, injected or not, one at a time.

    device: None leaves each weight where it is. away: takes the layers that are streamed.
    """
    found = targets(model, before)
    uses = Counter(name for target in found for name in {part.name for part in target.recipe.parts})
    for index, part in parted(found, away):
        for target in part:
            _settle(target, before, device, uses)
        if away is not None and index is not None:
            away.keep(index, [each for target in part for each in target.parameters])
    settle_buffers(model, before, device)


def _settle(target: Target, before: Before, device: torch.device | None, uses: Counter[str]) -> None:
    """Convert, fuse and move one weight. uses: number of weights that still need each tensor of the model."""
    parts = target.recipe.parts
    if target.recipe.is_whole:
        parameter = before.tensors[parts[0].name]
        parameter.data = parameter.data.to(device=device, dtype=target.dtype)
        target.give(parameter)
        return
    weight = target.empty(device or before.tensors[parts[0].name].device)
    last = {part.name: number for number, part in enumerate(parts)}
    for number, part in enumerate(parts):
        parameter = before.tensors[part.name]
        write(part, weight, parameter.data)
        if last[part.name] == number:
            uses[part.name] -= 1
        if not uses[part.name]:
            parameter.data = torch.empty(0)  # free it: the fused copy is enough
    target.give(weight)


def drop(model: nn.Module) -> None:
    """Free the weights of a model that will be loaded from a checkpoint."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            made = nn.Parameter(torch.empty_like(parameter.data, device="meta"), requires_grad=False)
            module._parameters[name] = empty.setdefault(id(parameter), made)


def check_buffers(model: nn.Module, sources: Mapping[str, Source]) -> None:
    """Refuse a module with buffers that have no values and no source."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in sources]
    if empty:
        raise ModelError(
            f"model: buffers without values that no checkpoint stores: {len(empty)} ({', '.join(empty[:5])}); make the "
            "module under outpace.OnDevice('meta'), which leaves its buffers real"
        )


def settle_buffers(model: nn.Module, before: Before, device: torch.device | None) -> None:
    """Convert and move the buffers of a model."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            buffer.data = buffer.data.to(device=device, dtype=before.dtypes.get(name, buffer.dtype))


def fill(
    model: nn.Module,
    before: Before,
    sources: Mapping[str, Source],
    device: torch.device,
    advance: Advance = lambda count: None,
    away: Streaming | None = None,
) -> None:
    """Fill a skeleton, injected or not, from a checkpoint; each byte goes directly to its final place.

    away: takes the layers that are streamed. They are assembled on the device one by one.
    """
    for index, part in parted(targets(model, before), away):
        if away is not None and index is not None and away.is_there(index):
            for target in part:
                kept = target.kept.items()
                target.give_all({end: torch.empty(0, dtype=dtype, device=device) for end, (_, dtype) in kept})
            away.find(index, [each for target in part for each in target.parameters])
            advance(stored_bytes({each.name: sources[each.name] for target in part for each in target.recipe.parts}))
            continue
        _fill(part, before, sources, device, advance)
        if away is not None and index is not None:
            away.keep(index, [each for target in part for each in target.parameters])
    for path, module in model.named_modules():
        for name in [name for name, _ in module.named_buffers(prefix=path, recurse=False)]:
            if name in sources:
                module._buffers[name.rpartition(".")[2]] = read(sources[name]).to(before.dtypes[name])
    settle_buffers(model, before, device)


def _fill(
    every: list[Target], before: Before, sources: Mapping[str, Source], device: torch.device, advance: Advance
) -> None:
    """Fill some weights.

    A weight with a scheme is assembled first and quantized as soon as it is complete; one that runs as it is stored is
    filled part by part.
    """
    found = [target for target in every if target.recipe.scheme is None]
    made = list(zip(found, _allocated(found, device), strict=True))
    work = [job for target, weight in made for job in jobs(target.recipe, weight, sources)]
    for target, weight in made:
        _keep(target, weight, sources, before)
    parts = _stored_parts([target for target in every if target.runs_as_stored], sources, device)
    later = [target for target in every if target.recipe.scheme is not None and not target.runs_as_stored]
    largest = max((target.nbytes for target in later), default=0)
    scratch = _Scratch(largest) if device.type == "cpu" else None
    waiting = [_Waiting(target, sources, before, device, scratch) for target in later]
    waiting.sort(key=lambda each: each.place)
    groups: list[Group] = [*parts, *waiting]
    stream(work, device, advance, groups)
    if groups and device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of assembled weights belongs to another stream
    for target, weight in made:
        target.give(weight)


def _stored_parts(found: list[Target], sources: Mapping[str, Source], device: torch.device) -> list[StoredPart]:
    """Allocate the weights that run as they are stored; returns the groups that fill them."""
    parts: list[StoredPart] = []
    with _memory_errors(found, device):
        for target in found:
            made = target.empty_parts(device)
            target.give_all(made)
            parts += [StoredPart(part, sources[part.name], made, target.recipe) for part in target.recipe.parts]
    return sorted(parts, key=lambda part: part.place)


def _keep(target: Target, weight: Tensor, sources: Mapping[str, Source], before: Before) -> None:
    """Keep the value of a buffer that the checkpoint lacks."""
    for part in target.recipe.parts:
        if part.name not in sources:
            write(part, weight, before.tensors[part.name])


class _Scratch:
    """Reusable memory on a CPU in which weights are assembled.

    New memory for each weight would lie between weights that stay, and leave holes that malloc never returns.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Tensor] = []  # several threads: pop and append are atomic

    def take(self, target: Target) -> Tensor:
        """Memory to assemble a weight in."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._more()
        weight = buffer[: math.prod(target.recipe.shape) * target.dtype.itemsize]
        weight = weight.view(target.dtype).view(target.recipe.shape)
        return weight.zero_() if target.recipe.has_gaps else weight

    def _more(self) -> Tensor:
        try:
            return _bytes(self._size)
        except RuntimeError as error:  # torch's errors of memory
            raise ModelError(
                f"model: a weight of {size_text(self._size)} is assembled in memory before it is quantized, but there "
                "is not enough free memory; free some, or use a smaller dtype, a smaller model or another machine"
            ) from error

    def give_back(self, weight: Tensor) -> None:
        """Reuse the memory of a weight."""
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage()))


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class _Waiting:
    """A weight that is assembled and then quantized (a `stream.Group`)."""

    def __init__(
        self,
        target: Target,
        sources: Mapping[str, Source],
        before: Before,
        device: torch.device,
        scratch: _Scratch | None,
    ) -> None:
        self._target, self._sources, self._before, self._device = target, sources, before, device
        self._scratch = scratch
        self._weight: Tensor | None = None
        pieces = [
            piece
            for part in target.recipe.parts
            for piece in (sources[part.name].pieces if part.name in sources else ())
        ]
        self.nbytes = sum(piece.dtype.itemsize * math.prod(piece.shape) for piece in pieces)
        self.held = target.nbytes
        self.place = first_place(pieces)
        """Its first place in the files."""

    def begin(self) -> list[Job]:
        if self._scratch is not None:
            self._weight = self._scratch.take(self._target)
        else:
            (self._weight,) = _allocated([self._target], self._device)
        _keep(self._target, self._weight, self._sources, self._before)
        return list(jobs(self._target.recipe, self._weight, self._sources))

    def end(self) -> None:
        assert self._weight is not None, "end is called after begin"
        weight, self._weight = self._weight, None
        self._target.give(weight)
        if self._scratch is not None:
            self._scratch.give_back(weight)


def _allocated(found: list[Target], device: torch.device) -> list[Tensor]:
    """Allocate all weights, or raise an error with the size that is needed."""
    with _memory_errors(found, device):
        return [target.empty(device) for target in found]


@contextmanager
def _memory_errors(found: list[Target], device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's errors of memory, of every device
        size = sum(target.nbytes for target in found)
        raise ModelError(
            f"model: its weights take {size_text(size)} on {device}, which has not enough free memory; free some, or "
            "use a smaller dtype, a smaller model or another device"
        ) from error
