"""Layers as units of bytes: which layers a model has, what is in them, and where in a unit each parameter lies."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outpace.offload.store_layout import padded as whole_pages

ALIGN = 512  # bytes, as torch aligns tensors on a GPU: the same kernels run on views of a slot


@dataclass(frozen=True)
class Held:
    """A parameter of a layer and its place in the unit."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int

    def view(self, unit: Tensor) -> Tensor:
        """The parameter in the bytes of a unit."""
        return unit[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass
class Unit:
    """A layer that does not stay on the device."""

    path: str
    layer: nn.Module
    number: int
    """Its place among all layers."""
    held: list[Held] = field(default_factory=list)
    nbytes: int = 0

    def lay_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give each of these a place."""
        offset = 0
        for parameter in parameters:
            tensor = parameter.data = dense(parameter.data)
            place = Held(parameter, tuple(tensor.shape), tensor.stride(), tensor.dtype, offset, tensor.nbytes)
            self.held.append(place)
            offset += _aligned(tensor.nbytes)
        self.nbytes = whole_pages(offset)

    def layout(self) -> list[list[Any]]:
        """What lies where, without the parameters."""
        return [[h.shape, h.stride, str(h.dtype).removeprefix("torch."), h.offset, h.nbytes] for h in self.held]

    def held_as(self, parameters: Sequence[nn.Parameter], layout: Sequence[Sequence[Any]]) -> None:
        """Give parameters the places that `layout` told of."""
        for parameter, (shape, stride, dtype, offset, nbytes) in zip(parameters, layout, strict=True):
            kind = getattr(torch, dtype)
            self.held.append(Held(parameter, tuple(shape), tuple(stride), kind, offset, nbytes))
        self.nbytes = unit_bytes(each.nbytes for each in self.held)

    def pack(self, into: Tensor) -> None:
        """Copy its parameters to their places in a unit, and let go of them."""
        for each in self.held:
            tensor = each.parameter.data
            flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            into[each.offset : each.offset + each.nbytes].copy_(flat)
            each.parameter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def bind(self, slot: Tensor) -> None:
        """Let its parameters be views of a slot."""
        for each in self.held:
            each.parameter.data = each.view(slot)


def unit_bytes(tensors: Iterable[int]) -> int:
    """Bytes of a unit of tensors of so many."""
    return whole_pages(sum(map(_aligned, tensors)))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def dense(tensor: Tensor) -> Tensor:
    """A tensor whose values lie together in memory, in whatever order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of a model's lists of layers, by path, in the order in which they are registered.

    A list is an nn.ModuleList or nn.Sequential with two members or more that have weights; lists in layers are part of
    these.
    """
    return list(_layers(model, ""))


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        members = [(f"{inner}.{key}", each) for key, each in child.named_children() if _has_weights(each)]
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1:
            yield from members
        else:
            yield from _layers(child, inner)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
