"""Lays out layers as units of bytes: finds the layers of a model and gives each parameter a place in its unit.

A unit with a fused stack of experts has a dense part, which every token needs, and then one piece for each expert with
all its parameters. The stacks are strided views over these pieces, which kernels support, so one expert is one copy and
so is the whole layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import OffloadError
from outpace.inject.experts import Experts
from outpace.offload.store_layout import padded as whole_pages

ALIGN = 512  # bytes; torch aligns GPU tensors like this, so kernels run on views of a slot


@dataclass(frozen=True)
class Form:
    """The size of a unit: its dense part and its experts."""

    dense: int
    """Bytes of the dense part, which comes first."""
    experts: int = 0
    """Number of experts; 0: the unit has only a dense part."""
    piece: int = 0
    """Bytes of each expert."""

    @classmethod
    def of(cls, tensors: Iterable[int], stacks: Iterable[int] = (), experts: int = 0) -> "Form":
        """The form for tensors and stacks of experts with these numbers of bytes."""
        of_each = [each // experts for each in stacks]
        return cls(unit_bytes(tensors), experts, unit_bytes(of_each)) if of_each else cls(unit_bytes(tensors))

    @property
    def nbytes(self) -> int:
        return self.dense + self.experts * self.piece

    @property
    def parts(self) -> list[slice]:
        """The dense part, then each expert; a file stores them one by one."""
        return [slice(0, self.dense), *map(self.expert, range(self.experts))]

    def runs(self, experts: Iterable[int]) -> list[slice]:
        """The dense part and these experts, merged into as few slices as possible."""
        found = [slice(0, self.dense)]
        for place in map(self.expert, experts):
            if place.start == found[-1].stop:
                place = slice(found.pop().start, place.stop)
            found.append(place)
        return found

    def expert(self, number: int) -> slice:
        start = self.dense + number * self.piece
        return slice(start, start + self.piece)


@dataclass(frozen=True)
class Held:
    """A parameter of a layer and its place in the unit."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    """Bytes of the parameter; for a stack, of one expert, with a stride of one piece to the next."""

    def view(self, unit: Tensor) -> Tensor:
        return unit[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass
class Unit:
    """A streamed layer."""

    path: str
    layer: nn.Module
    form: Form
    held: list[Held] = field(default_factory=list)

    def lay_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give each parameter a place."""
        offset, after, form = 0, self.form.dense, self.form
        experts = experts_of(self.layer) if form.experts else None
        stacks = set[int]() if experts is None else {id(each) for each in _stacks(experts)}
        for parameter in parameters:
            if id(parameter) in stacks:
                tensor = parameter.data = parameter.data.contiguous()
                place, size, after = after, tensor[0].nbytes, after + _aligned(tensor[0].nbytes)
                stride = (form.piece // tensor.itemsize, *tensor.stride()[1:])
            else:
                tensor = parameter.data = dense(parameter.data)
                place, size, offset = offset, tensor.nbytes, offset + _aligned(tensor.nbytes)
                stride = tensor.stride()
            self.held.append(Held(parameter, tuple(tensor.shape), stride, tensor.dtype, place, size))
        if (whole_pages(offset), whole_pages(after - form.dense)) != (form.dense, form.piece):
            raise OffloadError(
                f"offload: {self.path} takes {offset} bytes and {after - form.dense} for each of {form.experts} "
                f"experts, but {form.dense} and {form.piece} were expected"
            )

    def layout(self) -> list[list[Any]]:
        """The places of all parameters, for JSON."""
        return [[h.shape, h.stride, str(h.dtype).removeprefix("torch."), h.offset, h.nbytes] for h in self.held]

    def held_as(self, parameters: Sequence[nn.Parameter], layout: Sequence[Sequence[Any]]) -> None:
        """Give parameters the places from `layout`."""
        for parameter, (shape, stride, dtype, offset, nbytes) in zip(parameters, layout, strict=True):
            kind = getattr(torch, dtype)
            self.held.append(Held(parameter, tuple(shape), tuple(stride), kind, offset, nbytes))

    def pack(self, into: Tensor) -> None:
        """Copy all parameters to their places in a unit, and free them."""
        for each in self.held:
            tensor = each.parameter.data
            flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            for number, part in enumerate(flat.split(each.nbytes)):  # for a stack: one part for each expert
                start = each.offset + number * self.form.piece
                into[start : start + each.nbytes].copy_(part)
            each.parameter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def bind(self, slot: Tensor) -> None:
        for each in self.held:
            each.parameter.data = each.view(slot)


def experts_of(layer: nn.Module) -> Experts | None:
    """The fused experts of a layer, if it has exactly one stack with several experts."""
    found = [module for module in layer.modules() if isinstance(module, Experts) and module.recipes]
    return found[0] if len(found) == 1 and found[0].num_experts > 1 else None


def is_stacked(module: nn.Module, shape: Sequence[int]) -> bool:
    """Whether a tensor is divided by expert. Biases are not: kernels need them contiguous."""
    return isinstance(module, Experts) and len(shape) == 3


def _stacks(experts: Experts) -> Iterator[nn.Parameter]:
    return (each for each in experts.parameters(recurse=False) if is_stacked(experts, each.shape))


def unit_bytes(tensors: Iterable[int]) -> int:
    """Bytes of several aligned tensors, one after the other."""
    return whole_pages(sum(map(_aligned, tensors)))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def dense(tensor: Tensor) -> Tensor:
    """The tensor, with its values contiguous in memory in some order of dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model with their paths, each once, in the order in which they are registered.

    Layers are the members with weights of an nn.ModuleList or nn.Sequential. Lists inside of layers do not count,
    except if the outer list has only one member. If a member is itself only a list, its members are the layers.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, layer in list(_layers(model, "")) or _in_list(model, ""):
        found.setdefault(id(layer), (path, layer))
    return list(found.values())


def layer_of(layers: Sequence[nn.Module]) -> dict[int, int]:
    """id of a module -> index of its layer, for modules that are in exactly one layer."""
    found: dict[int, set[int]] = {}
    for number, layer in enumerate(layers):
        for module in layer.modules():
            found.setdefault(id(module), set()).add(number)
    return {module: numbers.pop() for module, numbers in found.items() if len(numbers) == 1}


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        yield from _in_list(child, inner) or _layers(child, inner)


def _in_list(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The layers in a list; empty if it is not a list, or its only member contains layers."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    before = f"{path}." if path else ""
    members = [(f"{before}{key}", each) for key, each in module.named_children() if _has_weights(each)]
    if len(members) == 1 and next(_layers(module, path), None) is not None:
        return []
    return [layer for each in members for layer in _run(*each)]


def _run(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, or its children if it is only a container."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield path, module
        return
    for name, each in module.named_children():
        if _has_weights(each):
            yield from _run(f"{path}.{name}", each)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
