"""A cache of experts of streamed layers on the device: the last used experts of each layer."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.offload.units import Form

ALL = 3
"""With this many choices per expert, all experts are prefetched with the layer, and the host does not read the choices.

If choices were random, e**-3 (5 %) of the experts would not be needed: too few to make the link wait for the choices.
"""


@dataclass
class Counts:
    """Counters of fetched layers and experts."""

    loads: int = 0
    """Units that were loaded."""
    nbytes: int = 0
    """Bytes from host memory or files."""
    hits: int = 0
    """Cache hits: needed experts that were on the device."""
    misses: int = 0
    """Cache misses: needed experts that were fetched."""


class Kept:
    """The last used experts of one layer, in pieces of device memory.

    Each layer has its own pieces: layers run in turn, so in a shared cache the least recently used piece would be one
    that is needed next.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._free = list(pieces)
        self._pieces: OrderedDict[int, Tensor] = OrderedDict()  # least recently used first

    def find(self, experts: Collection[int]) -> dict[int, Tensor]:
        """The pieces of those of these experts that are cached."""
        found = [expert for expert in experts if expert in self._pieces]
        for expert in found:
            self._pieces.move_to_end(expert)
        return {expert: self._pieces[expert] for expert in found}

    def take(self, experts: Sequence[int], used: Collection[int]) -> dict[int, Tensor]:
        """Pieces for as many new experts as possible: free ones, then those of cached experts that are not in use."""
        new = [expert for expert in experts if expert not in self._pieces]
        old = [expert for expert in self._pieces if expert not in used]
        room = len(self._free) + len(old)
        for expert in old[: max(0, min(len(new), room) - len(self._free))]:
            self._free.append(self._pieces.pop(expert))
        return {expert: self._free.pop() for expert in new[:room]}

    def put(self, pieces: Mapping[int, Tensor]) -> None:
        """These experts are now in the pieces that were taken for them."""
        self._pieces.update(pieces)

    def forget(self, taken: Mapping[int, Tensor]) -> None:
        """The content of all pieces is unknown; free them."""
        self._free += [*taken.values(), *self._pieces.values()]
        self._pieces.clear()


def shares(forms: Sequence[Form], nbytes: int) -> list[int]:
    """Number of pieces for each unit out of `nbytes`: one by one in turn, at most one for each of its experts."""
    counts, left = [0] * len(forms), -1
    while left != nbytes:
        left = nbytes
        for number, form in enumerate(forms):
            if counts[number] < form.experts and form.piece <= nbytes:
                counts[number] += 1
                nbytes -= form.piece
    return counts
