"""Which layers each pipeline stage has, and the ideal idle share. Arithmetic only, no tensors."""

from collections.abc import Callable, Sequence

from outpace.errors import ConfigError
from outpace.parallel.spans import Span

FIELD = "pipeline_parallel.pp_size"


def balanced(layers: Sequence[int], stages: int, first: int = 0, last: int = 0) -> tuple[Span, ...]:
    """Consecutive layers for each stage: minimizes the slowest stage's time, then the largest stage's size.

    layers: bytes of each. first: bytes that only take space in the first stage, such as an embedding, of which a step
    reads a few rows. last: bytes that the last stage reads besides, such as the head.
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
    """The cut with the cheapest worst stage, and the cost of that stage. A stage that costs None is not allowed."""
    best: dict[int, tuple[int, tuple[Span, ...]]] = {0: (0, ())}  # by number of layers already assigned
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
    """Consecutive layers for each stage, by the given counts."""
    if sum(layers) != count:
        raise ConfigError(
            f"pipeline_parallel.layers: {tuple(layers)} are {sum(layers)} layers, and the model has {count}; make "
            f"them add up to {count}, or remove them"
        )
    stops = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    return tuple(zip([0, *stops], stops, strict=False))


def bubble(stages: int, parts: int) -> float:
    """The idle share of equally fast stages while `parts` micro-batches go through them once."""
    return (stages - 1) / (parts + stages - 1)


def parts_of(count: int, parts: int) -> list[Span]:
    """Divide `count` items into at most `parts` parts of about equal size."""
    parts = min(count, parts)
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]
