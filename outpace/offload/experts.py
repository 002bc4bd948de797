"""Experts of streamed layers that stay on the device for a while: those of each layer that were used last."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.offload.units import Form

ALL = 3
"""Choices for each expert from which on all experts are fetched ahead of the layer, and nobody looks at the choices.

If they were random, experts that nobody chose would be e**-3, 5 % of all: too few for the link to wait for a look.
"""


@dataclass
class Counts:
    """What was fetched so far."""

    loads: int = 0
    """Units."""
    nbytes: int = 0
    """Bytes that came from host memory or from files."""
    hits: int = 0
    """Experts that were needed and still on the device."""
    misses: int = 0
    """Experts that were needed and fetched."""


class Kept:
    """The experts of one layer that were used last, in pieces of device memory.

    Each layer has pieces of its own. Layers run in turn: in a cache of all of them, the piece that was used longest
    ago would be one that is needed next.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._free = list(pieces)
        self._pieces: OrderedDict[int, Tensor] = OrderedDict()  # those used last come last

    def find(self, experts: Collection[int]) -> dict[int, Tensor]:
        """The pieces of those of the experts that are here."""
        found = [expert for expert in experts if expert in self._pieces]
        for expert in found:
            self._pieces.move_to_end(expert)
        return {expert: self._pieces[expert] for expert in found}

    def take(self, experts: Sequence[int], used: Collection[int]) -> dict[int, Tensor]:
        """Pieces for some of these experts that have none: free ones, and those of experts that are not in use now."""
        new = [expert for expert in experts if expert not in self._pieces]
        old = [expert for expert in self._pieces if expert not in used]
        room = len(self._free) + len(old)
        for expert in old[: max(0, min(len(new), room) - len(self._free))]:
            self._free.append(self._pieces.pop(expert))
        return {expert: self._free.pop() for expert in new[:room]}

    def put(self, pieces: Mapping[int, Tensor]) -> None:
        """Experts are now in these pieces, which were taken for them."""
        self._pieces.update(pieces)

    def forget(self, taken: Mapping[int, Tensor]) -> None:
        """Nothing is known of what is in the pieces any more."""
        self._free += [*taken.values(), *self._pieces.values()]
        self._pieces.clear()


def shares(forms: Sequence[Form], nbytes: int) -> list[int]:
    """How many pieces each unit gets of so many bytes: by turns, and none more than it has experts."""
    counts, left = [0] * len(forms), -1
    while left != nbytes:
        left = nbytes
        for number, form in enumerate(forms):
            if counts[number] < form.experts and form.piece <= nbytes:
                counts[number] += 1
                nbytes -= form.piece
    return counts
