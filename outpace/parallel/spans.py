"""Which rows and heads each rank holds: arithmetic on numbers alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from outpace.errors import NotSupported

Span = tuple[int, int]
"""Indices from the first to before the second."""
Spans = tuple[Span, ...]
"""What one rank holds of a dimension, in ascending order."""


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor cut over ranks along one dimension; ranks that share a key head hold the same rows of it."""

    dim: int
    spans: tuple[Spans, ...]
    """Of each rank: its part is the concatenation of these spans along `dim`."""

    def sizes(self) -> tuple[int, ...]:
        """The size of each rank's part along `dim`."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank: every query head of it uses a key head of it, and each key head has as many of them."""

    query: Span
    kv: Span


def even(size: int, ranks: int, what: str, grain: int = 1) -> tuple[Span, ...]:
    """`size` indices over the ranks, as evenly as possible: the first ranks hold one more where it does not divide.

    grain: each rank holds a multiple of it, where it divides the size and there is one for each rank.
    """
    if grain > 1 and size % grain == 0 and size >= grain * ranks:
        return tuple((first * grain, last * grain) for first, last in even(size // grain, ranks, what))
    if size < ranks:
        raise NotSupported(
            f"tensor parallelism: {what} cannot be split over {ranks} ranks: there are only {size}; use fewer ranks"
        )
    each, more = divmod(size, ranks)
    stops = [each * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return tuple(zip([0, *stops], stops, strict=False))


def split_heads(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[Heads, ...]:
    """The heads of each rank. Groups of query heads stay whole where there is a key head for each rank.

    With fewer key heads than ranks, some ranks share a key head and each takes a part of its query heads.
    """
    if num_heads < ranks:
        raise NotSupported(
            f"tensor parallelism: {num_heads} attention heads cannot be split over {ranks} ranks; use fewer"
        )
    group = num_heads // num_kv_heads
    if num_kv_heads >= ranks:
        return tuple(
            Heads((first * group, last * group), (first, last)) for first, last in even(num_kv_heads, ranks, "")
        )
    found = []
    for head, (first, last) in enumerate(even(ranks, num_kv_heads, "")):  # which ranks share this key head
        for start, stop in even(group, last - first, ""):
            found.append(Heads((head * group + start, head * group + stop), (head, head + 1)))
    return tuple(found)


def scaled(spans: Iterable[Span], width: int) -> Spans:
    """Spans of rows from spans of units of `width` rows each; neighbours become one."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start * width:
            joined[-1] = (joined[-1][0], stop * width)
        elif stop > start:
            joined.append((start * width, stop * width))
    return tuple(joined)


def halves(span: Span, size: int) -> tuple[Span, Span]:
    """The same span in both halves of a dimension of twice `size`: gate and up in one weight."""
    return span, (size + span[0], size + span[1])


def _rows(heads: Heads, num_heads: int, num_kv_heads: int) -> list[Span]:
    """All q, all k, all v."""
    return [
        heads.query,
        *((first + heads.kv[0], first + heads.kv[1]) for first in (num_heads, num_heads + num_kv_heads)),
    ]


def _heads(heads: Heads, num_heads: int, num_kv_heads: int) -> list[Span]:
    """q, k, v of each head."""
    return [(3 * heads.query[0], 3 * heads.query[1])]


def _groups(heads: Heads, num_heads: int, num_kv_heads: int) -> list[Span]:
    """The q's, k and v of each group."""
    size = num_heads // num_kv_heads
    found = []
    for group in range(*heads.kv):
        start, stop = (min(max(head - group * size, 0), size) for head in heads.query)
        first = group * (size + 2)
        found += [(first + start, first + stop), (first + size, first + size + 2)]
    return found


def _quarters(heads: Heads, num_heads: int, num_kv_heads: int) -> list[Span]:
    """The q's, v's and k's of each quarter of the heads."""
    size = num_heads // 4
    found = []
    for quarter in range(4):
        start, stop = (min(max(head - quarter * size, 0), size) for head in heads.query)
        found += [(first + start, first + stop) for first in range(3 * quarter * size, 3 * (quarter + 1) * size, size)]
    return found


LAYOUTS: Mapping[str, Callable[[Heads, int, int], list[Span]]] = {
    "rows": _rows, "heads": _heads, "groups": _groups, "quarters": _quarters,
}  # fmt: skip
"""Units of a fused qkv that belong to some heads, by the layout that a policy names; a unit has head_dim rows."""
