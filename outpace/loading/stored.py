"""Weights that a file stores quantized: converted while loading, or run as they are stored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.inject.modules import Made
from outpace.inject.quantized import float8_as_bytes
from outpace.inject.recipe import Part, Recipe
from outpace.kernels.packed import Packed
from outpace.loading.dtypes import short
from outpace.loading.jobs import Job, jobs
from outpace.loading.read_source import read
from outpace.loading.weights import Piece, Source, first_place
from outpace.log import chosen, size_text
from outpace.quant.scheme import Scheme
from outpace.quant.stored import StoredForms, fitted

_NO_FORM = "the fused weight cannot hold this format, or the device has no kernel for it"
_NOT_ALONE = "weights that are merged into one tensor, such as experts, cannot run as they are stored yet"


class StoredWeight(ABC):
    """A quantized weight [N, K] of a file. It is the `place` of a `Piece`, and converts its stored tensors."""

    sources: Mapping[str, Source]
    """Ending of the name -> its stored tensor."""
    note: str | None = None
    """The checkpoint's quantized activations and cache, for the log; None: it has none."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of its format in the log."""

    @property
    def peeks(self) -> tuple[str, ...]:
        """Stored tensors whose values are needed on the host."""
        return ()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its stored tensors."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """The converted weight, on the host."""

    @abstractmethod
    def scheme(self, dtype: torch.dtype) -> Scheme | str:
        """The scheme that holds its numbers in a model of this dtype, or why there is none. Reads no weights."""

    @abstractmethod
    def packed(self, tensors: Mapping[str, Tensor], scales: torch.dtype) -> Packed:
        """The weight as a `Packed` on the device of its stored tensors; those of `peeks` are on the host.

        scales: dtype of scales and zeros that are computed rather than stored.
        """


def stored_weight(source: Source) -> StoredWeight | None:
    """The stored weight that is a whole tensor of the model, unchanged; None: the source is something else."""
    if len(source.pieces) != 1:
        return None
    piece = source.pieces[0]
    whole = not piece.take and not piece.into and piece.swap is None
    return piece.place if whole and isinstance(piece.place, StoredWeight) else None


def stored_forms(
    sources: Mapping[str, Source], dtype: torch.dtype, runs: Callable[[Scheme], bool]
) -> StoredForms | None:
    """The tensors of a model that can run as its checkpoint stores them; None: there are none.

    runs: whether the device has kernels for a scheme.
    """
    schemes: dict[str, Scheme] = {}
    for name, source in sources.items():
        if (weight := stored_weight(source)) is not None and isinstance(scheme := weight.scheme(dtype), Scheme):
            schemes |= {name: scheme} if runs(scheme) else {}
    return StoredForms(schemes, dtype) if schemes else None


def reasons(sources: Mapping[str, Source]) -> set[str]:
    """The reasons why quantized weights cannot run as they are stored, each with the name of the format."""
    found = set()
    for source in sources.values():
        places = [piece.place for piece in source.pieces[:1] if isinstance(piece.place, StoredWeight)]
        for weight in places:
            why = weight.scheme(torch.float32) if stored_weight(source) is not None else _NOT_ALONE
            found |= {f"{weight.label}: {why}"} if isinstance(why, str) else set()
    return found


def kept_names(model: nn.Module) -> set[str]:
    """Names of the tensors that a model runs as they are stored."""
    made = [recipe for module in model.modules() if isinstance(module, Made) for recipe in module.recipes.values()]
    return {part.name for recipe in made if recipe.scheme and recipe.scheme.stored for part in recipe.parts}


def as_read(sources: Mapping[str, Source], kept: Collection[str]) -> dict[str, Source]:
    """The sources that are read: for tensors in `kept` their stored tensors."""
    found = {name: source for name, source in sources.items() if name not in kept}
    for name in kept:
        if (weight := stored_weight(sources[name])) is not None:
            found |= {name + ending: source for ending, source in weight.sources.items()}
    return found


def log_converted(
    sources: Mapping[str, Source], dtype: torch.dtype, kept: Collection[str] = (), *, note: str | None
) -> None:
    """Log which quantized weights are converted, and why. note: one reason for all of them, instead of their own."""
    activations: set[tuple[str, str | None]] = set()
    found: dict[tuple[str, str], dict[int, Piece]] = {}
    for name, source in sources.items():
        for piece in source.pieces:
            weight = piece.place
            if not isinstance(weight, StoredWeight):
                continue
            whole = stored_weight(source) is not None
            scheme = (weight.scheme(dtype) if whole else _NOT_ALONE) if name in kept or note is None else None
            if weight.note:
                rows = scheme.activations if name in kept and isinstance(scheme, Scheme) else None
                activations.add((weight.note, rows))
            if name not in kept:
                why = scheme if isinstance(scheme, str) else _NO_FORM if note is None else note
                found.setdefault((weight.label, why), {})[id(weight)] = piece
    for (label, why), pieces in sorted(found.items(), key=str):
        weights = [piece.place for piece in pieces.values() if isinstance(piece.place, StoredWeight)]
        sizes = f"{size_text(sum(weight.nbytes for weight in weights))} stored, "
        sizes += f"{size_text(sum(piece.nbytes for piece in pieces.values()))} in memory"
        count = f"{len(weights)} weights, " if kept else ""
        reason = f"; {why}" if why else ""
        chosen(label, f"converted to {short(dtype)} while loading", f"{count}{sizes}{reason}")
    for asked, kind in sorted(activations, key=str):
        if kind is None:
            chosen("activations", f"not quantized, although the checkpoint has {asked}", "this is more exact")
        else:
            chosen("activations", f"{kind}, with one scale for each token", f"the checkpoint has {asked}")


class StoredPart:
    """A stored weight that is read to the device and copied into its part of a fused weight (a `stream.Group`)."""

    def __init__(self, part: Part, source: Source, made: Mapping[str, Tensor], recipe: Recipe) -> None:
        weight, scheme = stored_weight(source), recipe.scheme
        assert weight is not None, f"{part.name} is stored as it runs"
        assert scheme is not None, f"{part.name} has a scheme"
        self._part, self._weight, self._made, self._scheme = part, weight, made, scheme
        self._tensors: dict[str, Tensor] = {}
        self.nbytes = self.held = weight.nbytes
        self.place = first_place(piece for source in weight.sources.values() for piece in source.pieces)
        """Its first place in the files."""

    def begin(self) -> list[Job]:
        found: list[Job] = []
        device = self._made[""].device
        for ending, source in self._weight.sources.items():
            if ending in self._weight.peeks:
                continue
            tensor = self._tensors[ending] = torch.empty(source.shape, dtype=source.dtype, device=device)
            found += jobs(Recipe.whole(ending, source.shape), tensor, {ending: source})
        return found

    def end(self) -> None:
        tensors, self._tensors = self._tensors, {}
        for ending in self._weight.peeks:
            if ending in self._weight.sources:
                tensors[ending] = read(self._weight.sources[ending])
        part, block = self._part, self._scheme.block_rows
        for ending, tensor in fitted(self._weight.packed(tensors, self._scheme.kept), self._scheme).items():
            if ending and not tensor.isfinite().all():
                raise ModelError(
                    f"model: the {ending.lstrip('_')}s of {part.name} hold NaN or infinity; download the model again"
                )
            place, found = float8_as_bytes(self._made[ending]), float8_as_bytes(tensor)
            first = part.start if ending == "" else part.start // block
            place = place.narrow(0, first, len(found))
            if part.order is None:
                place.copy_(found)
            else:
                place.index_copy_(0, part.order.rows().to(place.device), found)
