"""Which rows and heads each rank holds. Arithmetic only, no tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from outpace.errors import NotSupported

Span = tuple[int, int]
"""A half-open range of indices: (begin, end)."""
Spans = tuple[Span, ...]
"""The spans of a dimension that one rank holds, in ascending order."""


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor sharded along one dimension. Ranks that share a key head hold the same rows."""

    dim: int
    spans: tuple[Spans, ...]
    """For each rank, the spans along `dim` whose concatenation is its part."""

    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank: its query heads use its key heads, the same number for each key head."""

    query: Span
    kv: Span


def even(size: int, ranks: int, what: str, grain: int = 1) -> tuple[Span, ...]:
    """Divide `size` indices over the ranks as evenly as possible; the first ranks hold one more if it does not divide.

    grain: each rank holds a multiple of it, if it divides the size into at least one multiple per rank.
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


def even_split(
    dim: int, size: int, ranks: int, what: str, *, packed: bool = False, width: int = 1, grain: int = 1
) -> Split:
    """A dimension of `size` cut as evenly as possible: in both halves of it (packed), or in units of `width`."""
    part = size // (2 if packed else width)
    rows = even(part, ranks, what, grain)
    return Split(dim, tuple(scaled(halves(span, part) if packed else [span], width) for span in rows))


def split_heads(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[Heads, ...]:
    """The heads of each rank. If there is a key head for each rank, groups of query heads stay whole.

    With fewer key heads than ranks, ranks share a key head and divide its query heads.
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
    for head, (first, last) in enumerate(even(ranks, num_kv_heads, "")):  # the ranks that share this key head
        for start, stop in even(group, last - first, ""):
            found.append(Heads((head * group + start, head * group + stop), (head, head + 1)))
    return tuple(found)


def scaled(spans: Iterable[Span], width: int) -> Spans:
    """Spans of rows from spans of units of `width` rows; adjacent spans are merged."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start * width:
            joined[-1] = (joined[-1][0], stop * width)
        elif stop > start:
            joined.append((start * width, stop * width))
    return tuple(joined)


def halves(span: Span, size: int) -> tuple[Span, Span]:
    """The same spans in both halves of a dimension of 2 x `size`: gate and up in one weight."""
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
"""By the qkv layout that a policy names: the units (head_dim rows) of a fused qkv that belong to some heads."""
