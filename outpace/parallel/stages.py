"""Which layers each stage of a pipeline has, and whose turn it is: arithmetic on numbers alone."""

from collections.abc import Callable, Sequence

from outpace.errors import ConfigError
from outpace.parallel.spans import Span

FIELD = "pipeline_parallel.pp_size"


def balanced(layers: Sequence[int], stages: int, first: int = 0, last: int = 0) -> tuple[Span, ...]:
    """Consecutive layers for each stage: the slowest stage is as fast as can be, then the largest as small as can be.

    layers: the weights of each. first: those that only take room in the first stage: an embedding, of which a step
    reads a few rows. last: those that the last stage reads besides: a head.
    """
    count = len(layers)
    if count < stages:
        raise ConfigError(f"{FIELD}: {stages} stages, and the model has {count} layers; ask for fewer stages")
    before = [0]
    for weights in layers:
        before.append(before[-1] + weights)

    def reads(start: int, stop: int) -> int:
        return before[stop] - before[start] + (last if stop == count else 0)

    slowest, _ = _cut(count, stages, reads)

    def holds(start: int, stop: int) -> int | None:
        read = reads(start, stop)
        return None if read > slowest else read + (first if start == 0 else 0)

    return _cut(count, stages, holds)[1]


def _cut(count: int, stages: int, cost: Callable[[int, int], int | None]) -> tuple[int, tuple[Span, ...]]:
    """The stages whose worst costs least, and what it costs. A stage that costs None may not be."""
    best: dict[int, tuple[int, tuple[Span, ...]]] = {0: (0, ())}  # by the layers that are given away
    for stage in range(stages):
        found: dict[int, tuple[int, tuple[Span, ...]]] = {}
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            for start, (worst, spans) in best.items():
                if start < stop and (own := cost(start, stop)) is not None:
                    now = max(worst, own)
                    if stop not in found or now < found[stop][0]:
                        found[stop] = now, (*spans, (start, stop))
        best = found
    return best[count]


def as_asked(layers: Sequence[int], count: int) -> tuple[Span, ...]:
    """Consecutive layers for each stage, of which it has so many."""
    if sum(layers) != count:
        raise ConfigError(
            f"pipeline_parallel.layers: {tuple(layers)} are {sum(layers)} layers, and the model has {count}; make "
            f"them add up to {count}, or leave them out"
        )
    stops = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    return tuple(zip([0, *stops], stops, strict=False))


def bubble(stages: int, parts: int) -> float:
    """The share of the time that stages of equal speed stand idle while so many parts go through them once."""
    return (stages - 1) / (parts + stages - 1)


def parts_of(count: int, parts: int) -> list[Span]:
    """So many things in at most so many parts of about equal size."""
    parts = min(count, parts)
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]
