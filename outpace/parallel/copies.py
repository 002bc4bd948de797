"""Which experts each rank holds: its own, and copies of the busiest experts."""

from collections.abc import Sequence

from outpace.errors import as_field
from outpace.parallel.spans import even

Held = tuple[tuple[int, ...], ...]
"""The experts of each rank, in ascending order."""


def place_experts(count: int, ranks: int, extra: int = 0, load: Sequence[float] | None = None) -> Held:
    """Distribute experts evenly over ranks, plus `extra` copies on each rank of the experts with the most tokens.

    load: tokens of each expert. An expert's tokens are divided evenly among its copies.
    """
    with as_field("moe.ep_size", known_as="tensor parallelism"):
        held = [list(range(*span)) for span in even(count, ranks, "the experts of a layer")]
    if load is None or extra == 0:
        return tuple(tuple(each) for each in held)
    room = [min(extra, count - len(each)) for each in held]
    while any(room):
        expert, rank = _next(held, room, load)
        held[rank].append(expert)
        room[rank] -= 1
    return tuple(tuple(sorted(each)) for each in held)


def _next(held: list[list[int]], room: list[int], load: Sequence[float]) -> tuple[int, int]:
    """The next copy to make: the expert with the most tokens per copy, on the rank with the least work."""
    copies = [sum(expert in each for each in held) for expert in range(len(load))]
    work = [sum(load[expert] / copies[expert] for expert in each) for each in held]
    free = [rank for rank in range(len(held)) if room[rank]]
    wanted = sorted(range(len(load)), key=lambda expert: (-load[expert] / copies[expert], expert))
    for expert in wanted:
        able = [rank for rank in free if expert not in held[rank]]
        if able:
            return expert, min(able, key=lambda rank: (work[rank], rank))
    raise AssertionError("a rank with room for another expert lacks some expert")


def copies_of(held: Held, count: int) -> list[list[int]]:
    """The ranks that hold each expert."""
    return [[rank for rank, each in enumerate(held) if expert in each] for expert in range(count)]
