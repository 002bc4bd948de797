"""The weights of the running model: which tensors of the original each is made of, its dtype, its owners."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.inject.modules import Made
from outpace.inject.recipe import Part, Recipe
from outpace.loading.inspect import kept_in_fp32
from outpace.loading.skeleton import own_dtypes, set_dtype
from outpace.loading.weights import Source
from outpace.offload.streaming import Streaming
from outpace.quant.rounding import quantized


@dataclass(frozen=True)
class Before:
    """A model before injection: its tensors and the dtypes that they will have."""

    tensors: dict[str, Tensor]
    """Parameters and buffers."""
    dtypes: dict[str, torch.dtype]
    """dtypes of parameters and buffers in the running model."""

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> "Before":
        """Describe a model that will run in `dtype`, with the dtypes that Hugging Face would load.

        Tensors that its author keeps in float32 stay so, and tensors that its class creates in a fixed dtype keep it:
        rotary frequencies are always float32, and rounding them would change every position.
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
    """A weight of the running model, and all modules that own it."""

    recipe: Recipe
    dtype: torch.dtype
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def runs_as_stored(self) -> bool:
        """Whether the stored numbers of the checkpoint are used without conversion."""
        return self.recipe.scheme is not None and self.recipe.scheme.stored

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, as it stays or while it is assembled."""
        scheme, shape = self.recipe.scheme, self.recipe.shape
        return scheme.nbytes(shape) if scheme and self.runs_as_stored else math.prod(shape) * self.dtype.itemsize

    @property
    def kept(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of its owners: suffix of the name -> shape and dtype."""
        scheme, shape = self.recipe.scheme, self.recipe.shape
        return {"": (shape, self.dtype)} if scheme is None else scheme.tensors(shape)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of its owners, after `give`."""
        module, name = self.owners[0]
        return [module.get_parameter(name + end) for end in self.kept]

    def empty(self, device: torch.device) -> Tensor:
        make = torch.zeros if self.recipe.has_gaps else torch.empty
        return make(self.recipe.shape, dtype=self.dtype, device=device)

    def empty_parts(self, device: torch.device) -> dict[str, Tensor]:
        return {end: torch.empty(size, dtype=dtype, device=device) for end, (size, dtype) in self.kept.items()}

    def give(self, weight: Tensor) -> None:
        """Quantize the assembled weight, if it has a scheme, and set it in its owners."""
        if self.recipe.scheme is None:
            self.give_all({"": weight})
            return
        made = quantized(weight, self.recipe.scheme)
        if not made["_scale"].isfinite().all():
            names = ", ".join(dict.fromkeys(part.name for part in self.recipe.parts))
            raise ModelError(
                f"quant: {names} holds NaN or infinity, which cannot be quantized; check the weights, or "
                "name other weights in quant.weight.post_init_quant"
            )
        self.give_all(made)

    def give_all(self, made: Mapping[str, Tensor]) -> None:
        """Set tensors in its owners, by suffix of the name."""
        for end, tensor in made.items():
            own = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            for module, name in self.owners:
                module._parameters[name + end] = own


def targets(model: nn.Module, before: Before) -> list[Target]:
    """All weights of a model, each once, even if several modules share it."""
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
    """The sources that a partial model (such as a pipeline stage) needs of a checkpoint."""
    names = {part.name for target in targets(model, before) for part in target.recipe.parts}
    names.update(name for name, _ in model.named_buffers())
    return {name: source for name, source in sources.items() if name in names}


def parted(every: list[Target], away: Streaming | None) -> Iterator[tuple[int | None, list[Target]]]:
    """Weights that stay on the device (None), then those of each streamed layer with its number."""
    found: dict[int | None, list[Target]] = {None: []}
    for target in every:
        index = None if away is None else away.index_of(target.recipe, [module for module, _ in target.owners])
        found.setdefault(index, []).append(target)
    yield None, found.pop(None)
    yield from sorted(found.items(), key=lambda item: item[0] or 0)


def write(part: Part, weight: Tensor, tensor: Tensor) -> None:
    """Copy a tensor of the model to its place in a weight."""
    for each in part.slices:
        tensor = tensor.narrow(each.dim, each.start, each.length)
    place = part.place(weight)
    if part.order is None:
        place.copy_(tensor)
    else:
        rows = part.order.rows().to(place.device)
        place.index_copy_(part.rows_dim, rows, tensor.to(place.device, place.dtype))
