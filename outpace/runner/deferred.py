"""CUDA graphs that are captured after the first steps instead of at the start: which, and when.

A capture takes tens of milliseconds of host time. At the start some graphs of each kind are captured, the largest
among them, so that every step fits in some graph. The others follow one at a time: when the engine is idle, and
between steps once the padding for lack of a graph has cost as much as its capture. So the total cost is at most twice
the minimum.
"""

from collections.abc import Iterable

from outpace.runner.step_graphs import Shape, smallest

DECODES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIXED = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
CHUNKS = (64, 128, 512, 2048)  # other sizes run in a graph for mixed steps until they are captured
PAYS = 2048  # padding tokens that cost about as much as a capture: 45 and 55 ms for the 8B on an H200
FREE = 64  # tokens up to which padding is free: reading the weights takes longer
PACE = 64  # least steps between two captures while requests run


def first_shapes(wanted: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes to capture at the start, in the given order: some of each kind, and the largest."""
    wanted = tuple(wanted)
    mixed = any(shape.kind == "mixed" for shape in wanted)
    sizes = {"decode": DECODES, "mixed": MIXED, "chunks": CHUNKS if mixed else MIXED, "fresh": MIXED}
    largest = {kind: max((s.num_tokens for s in wanted if s.kind == kind), default=0) for kind in sizes}
    return tuple(s for s in wanted if s.num_tokens in sizes[s.kind] or s.num_tokens == largest[s.kind])


class Deferred:
    """Shapes without a graph yet, and what padding has cost for lack of them."""

    def __init__(self, wanted: Iterable[Shape] = ()) -> None:
        self._paid = dict.fromkeys(wanted, 0)
        """The cost in padding tokens."""
        self._idle_only: set[Shape] = set()
        self._steps = 0

    def __len__(self) -> int:
        return len(self._paid)

    def note(self, num_seqs: int, num_tokens: int, found: Shape | None) -> None:
        """Record that a step ran in `found`, the smallest graph that fits; None: without a graph."""
        self._steps += 1
        wanted = smallest(self._paid, num_seqs, num_tokens)
        if wanted is not None and found is not None:
            self._paid[wanted] += max(0, max(FREE, found.num_tokens) - max(FREE, wanted.num_tokens))

    def due(self) -> Shape | None:
        """The shape to capture now although requests are running; None: nothing, or not yet."""
        if self._steps < PACE:
            return None
        paid = [shape for shape in self._paid if shape not in self._idle_only and self._paid[shape] >= PAYS]
        return max(paid, key=self._paid.__getitem__, default=None)

    def next(self) -> Shape | None:
        """The shape to capture while idle: the one that has cost the most; None: all are captured."""
        return max(self._paid, key=self._paid.__getitem__, default=None)

    def done(self, shape: Shape) -> None:
        self._paid.pop(shape)
        self._steps = 0

    def leave_for_later(self, shape: Shape) -> None:
        """Capture this shape only while idle: it takes longer than requests should wait."""
        self._idle_only.add(shape)
        self._steps = 0

    def clear(self) -> None:
        """Give up: no more graphs will be captured."""
        self._paid.clear()
