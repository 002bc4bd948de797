"""Weights to where they run: which parameter is made of which tensors, in which dtype, and live modules' own."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.inject.modules import Made
from outpace.inject.recipe import Part, Recipe
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.jobs import Job, jobs
from outpace.loading.read_source import read
from outpace.loading.skeleton import own_dtypes, set_dtype
from outpace.loading.stored import StoredPart
from outpace.loading.stream import Advance, Group, stream
from outpace.loading.weights import Piece, Source, first_place, stored_bytes
from outpace.log import size_text
from outpace.offload.streaming import Streaming
from outpace.quant.rounding import quantized


@dataclass(frozen=True)
class Before:
    """A model as it was before injection: its tensors, by name, and what they shall become."""

    tensors: dict[str, Tensor]
    """Parameters and buffers."""
    dtypes: dict[str, torch.dtype]
    """Of parameters and buffers, once it runs."""

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> "Before":
        """Look at a model that will run in `dtype`: what Hugging Face would have loaded in it.

        What its author keeps in float32 stays so, and what its class makes in a dtype of its own gets that one: rotary
        frequencies are float32 whatever the weights' dtype, and rounding them changes every position.
        """
        keep, made, wanted = kept_in_fp32(model, dtype), own_dtypes(model, dtype), {}
        tensors = dict[str, Tensor](model.named_parameters()) | dict(model.named_buffers())
        for name, parameter in model.named_parameters():
            wanted[name] = made.get(name, dtype) if parameter.is_floating_point() else parameter.dtype
        for path, module in model.named_modules():
            for leaf, buffer in module.named_buffers(prefix=path, recurse=False):
                stored = leaf.rpartition(".")[2] not in module._non_persistent_buffers_set
                own = made.get(leaf, dtype if stored else buffer.dtype)
                wanted[leaf] = own if buffer.is_floating_point() else buffer.dtype
        wanted.update((name, torch.float32) for name in keep if wanted[name].is_floating_point)
        set_dtype(getattr(model, "config", None), dtype)
        return cls(tensors, wanted)


@dataclass
class Target:
    """A weight of the running model, and every module that has it."""

    recipe: Recipe
    dtype: torch.dtype
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def runs_as_stored(self) -> bool:
        """Whether its numbers are those of the checkpoint."""
        return self.recipe.scheme is not None and self.recipe.scheme.stored

    @property
    def nbytes(self) -> int:
        """Of it, as it stays or while it is put together."""
        scheme, shape = self.recipe.scheme, self.recipe.shape
        return scheme.nbytes(shape) if scheme and self.runs_as_stored else math.prod(shape) * self.dtype.itemsize

    @property
    def kept(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what its owners have of it, by what is put behind its name."""
        scheme, shape = self.recipe.scheme, self.recipe.shape
        return {"": (shape, self.dtype)} if scheme is None else scheme.tensors(shape)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What its owners have of it, once they have it."""
        module, name = self.owners[0]
        return [module.get_parameter(name + end) for end in self.kept]

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        make = torch.zeros if self.recipe.has_gaps else torch.empty
        return make(self.recipe.shape, dtype=self.dtype, device=device)

    def empty_parts(self, device: torch.device) -> dict[str, Tensor]:
        """Memory for what its scheme makes of it."""
        return {end: torch.empty(size, dtype=dtype, device=device) for end, (size, dtype) in self.kept.items()}

    def nothing(self, device: torch.device) -> dict[str, Tensor]:
        """Stand-ins without values for what its owners have of it."""
        return {end: torch.empty(0, dtype=dtype, device=device) for end, (_, dtype) in self.kept.items()}

    def give(self, weight: Tensor) -> None:
        """Let its owners have it, in the form that its scheme says."""
        if self.recipe.scheme is None:
            self.give_all({"": weight})
            return
        made = quantized(weight, self.recipe.scheme)
        if not made["_scale"].isfinite().all():
            names = ", ".join(dict.fromkeys(part.name for part in self.recipe.parts))
            raise ModelError(
                f"quant: {names} holds NaN or infinity, which cannot be quantized; check the weights, or let "
                "quant.weight.post_init_quant name others"
            )
        self.give_all(made)

    def give_all(self, made: Mapping[str, Tensor]) -> None:
        """Let its owners have tensors, by what is put behind its name."""
        for end, tensor in made.items():
            own = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            for module, name in self.owners:
                module._parameters[name + end] = own


def targets(model: nn.Module, before: Before) -> list[Target]:
    """Every weight of a model, each once, however many modules share it."""
    names = {id(tensor): name for name, tensor in before.tensors.items()}
    found: dict[Recipe, Target] = {}
    for module in model.modules():
        recipes, beside = (module.recipes, module.beside()) if isinstance(module, Made) else ({}, frozenset[str]())
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if leaf in beside:
                continue
            recipe = recipes.get(leaf) or Recipe.whole(names[id(parameter)], tuple(parameter.shape))
            if recipe not in found:
                kinds = {before.dtypes[part.name] for part in recipe.parts}
                found[recipe] = Target(recipe, torch.float32 if len(kinds) > 1 else kinds.pop())
            found[recipe].owners.append((module, leaf))
    return list(found.values())


def needed_of(model: nn.Module, before: Before, sources: Mapping[str, Source]) -> dict[str, Source]:
    """What of a checkpoint a model needs that is only a part of what the checkpoint is of."""
    names = {part.name for target in targets(model, before) for part in target.recipe.parts}
    names.update(name for name, _ in model.named_buffers())
    return {name: source for name, source in sources.items() if name in names}


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a live model in place, one tensor at a time, ties kept (see `Before.of`)."""
    settle(model, Before.of(model, dtype))


def settle(model: nn.Module, before: Before, device: torch.device | None = None, away: Streaming | None = None) -> None:
    """Give a live model, injected or not, its own weights: converted, fused and moved, one at a time.

    device: None leaves each where it is. away: where layers go that do not stay there.
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
    """One weight; `uses`: how often tensors of the model are still needed."""
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
            parameter.data = torch.empty(0)  # the fused copy is the only one
    target.give(weight)


def parted(every: list[Target], away: Streaming | None) -> Iterator[tuple[int | None, list[Target]]]:
    """Weights that stay on the device, then those of each layer that does not, with its number."""
    found: dict[int | None, list[Target]] = {None: []}
    for target in every:
        index = None if away is None else away.index_of(target.recipe, [module for module, _ in target.owners])
        found.setdefault(index, []).append(target)
    yield None, found.pop(None)
    yield from sorted(found.items(), key=lambda item: item[0] or 0)


def drop(model: nn.Module) -> None:
    """Let go of the weights of a model that will get others."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            made = nn.Parameter(torch.empty_like(parameter.data, device="meta"), requires_grad=False)
            module._parameters[name] = empty.setdefault(id(parameter), made)


def check_buffers(model: nn.Module, sources: Mapping[str, Source]) -> None:
    """Refuse a module with buffers that have no values and will get none."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in sources]
    if empty:
        raise ModelError(
            f"model: buffers without values that no checkpoint stores: {len(empty)} ({', '.join(empty[:5])}); make the "
            "module under outpace.OnDevice('meta'), which leaves its buffers real"
        )


def settle_buffers(model: nn.Module, before: Before, device: torch.device | None) -> None:
    """Buffers converted and moved."""
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
    """Fill a skeleton, injected or not, from a checkpoint: every byte goes straight to where it stays.

    away: where layers go that do not stay on the device. They pass through it one by one.
    """
    for index, part in parted(targets(model, before), away):
        if away is not None and index is not None and away.is_there(index):
            for target in part:
                target.give_all(target.nothing(device))
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
    """Fill weights.

    A weight with a scheme is put together first, and is quantized as soon as it is whole; one that runs as it is
    stored gets its numbers part by part.
    """
    found = [target for target in every if target.recipe.scheme is None]
    weights = _allocated(found, device)
    made = zip(found, weights, strict=True)
    work = [job for target, weight in made for job in jobs(target.recipe, weight, sources)]
    for target, weight in zip(found, weights, strict=True):
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
        torch.cuda.empty_cache()  # what weights were put together in belongs to another stream
    for target, weight in zip(found, weights, strict=True):
        target.give(weight)


def _stored_parts(found: list[Target], sources: Mapping[str, Source], device: torch.device) -> list[StoredPart]:
    """Memory for weights that run as they are stored, and what fills it."""
    parts: list[StoredPart] = []
    with _in_words(found, device):
        for target in found:
            made = target.empty_parts(device)
            target.give_all(made)
            parts += [StoredPart(part, sources[part.name], made, target.recipe) for part in target.recipe.parts]
    return sorted(parts, key=lambda part: part.place)


def _keep(target: Target, weight: Tensor, sources: Mapping[str, Source], before: Before) -> None:
    """A buffer that the checkpoint left out keeps its value."""
    for part in target.recipe.parts:
        if part.name not in sources:
            write(part, weight, before.tensors[part.name])


class _Scratch:
    """Memory on a CPU in which weights are put together, used again and again.

    Weights that come and go between those that stay would leave holes that malloc never returns.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Tensor] = []  # several threads: pop and append are atomic

    def take(self, target: Target) -> Tensor:
        """Memory for a weight."""
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
                f"model: a weight of {size_text(self._size)} is put together in memory before it is quantized, and "
                "there is not that much left; free some, or use a smaller dtype, a smaller model or another machine"
            ) from error

    def give_back(self, weight: Tensor) -> None:
        """Nobody uses it any more."""
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage()))


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class _Waiting:
    """A weight with a scheme that is not there yet (see `stream.Group`)."""

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
        pieces = [piece for part in target.recipe.parts for piece in _pieces_of(part, sources)]
        self.nbytes = sum(piece.dtype.itemsize * math.prod(piece.shape) for piece in pieces)
        self.held = target.nbytes
        self.place = first_place(pieces)
        """Where in the files it begins."""

    def begin(self) -> list[Job]:
        """See `Group`."""
        if self._scratch is not None:
            self._weight = self._scratch.take(self._target)
        else:
            (self._weight,) = _allocated([self._target], self._device)
        _keep(self._target, self._weight, self._sources, self._before)
        return list(jobs(self._target.recipe, self._weight, self._sources))

    def end(self) -> None:
        """See `Group`."""
        assert self._weight is not None, "it has begun"
        weight, self._weight = self._weight, None
        self._target.give(weight)
        if self._scratch is not None:
            self._scratch.give_back(weight)


def _pieces_of(part: Part, sources: Mapping[str, Source]) -> Sequence[Piece]:
    return sources[part.name].pieces if part.name in sources else ()


def _allocated(found: list[Target], device: torch.device) -> list[Tensor]:
    """Memory for all weights, or an error in words."""
    with _in_words(found, device):
        return [target.empty(device) for target in found]


@contextmanager
def _in_words(found: list[Target], device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's errors of memory, of every device
        size = sum(target.nbytes for target in found)
        raise ModelError(
            f"model: its weights take {size_text(size)} on {device}, which has not that much left; free some, or use a "
            "smaller dtype, a smaller model or another device"
        ) from error


def write(part: Part, weight: Tensor, tensor: Tensor) -> None:
    """Put a whole tensor of the model in its place in a weight."""
    for each in part.slices:
        tensor = tensor.narrow(each.dim, each.start, each.length)
    place = part.place(weight)
    if part.order is None:
        place.copy_(tensor)
    else:
        rows = part.order.rows().to(place.device)
        place.index_copy_(part.rows_dim, rows, tensor.to(place.device, place.dtype))
