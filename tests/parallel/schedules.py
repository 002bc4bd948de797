"""Schedules of pipelines, made by hand."""

from outpace.parallel.trace import Interval


def pipeline(stages: int, micro_batches: int, took: float = 1.0, gap: float = 0.0) -> dict[int, list[Interval]]:
    """The schedule of a pipeline with equal stages; `gap`: seconds between two micro-batches."""
    step = took + gap
    return {
        stage: [Interval(m, (stage + m) * step, (stage + m) * step + took) for m in range(micro_batches)]
        for stage in range(stages)
    }
