"""A trace of when each pipeline stage computed: written by the stages, read by `outpace bench pipeline`.

Off unless the environment variable OUTPACE_PIPELINE_TRACE names a folder. Each rank then writes a file there, a line
of JSON for each micro-batch or step, flushed at once, so that a killed rank leaves what it has recorded. Times are
`time.perf_counter`, which processes of one Linux machine share; ranks on other machines need an offset each.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outpace.errors import ConfigError, InputError
from outpace.parallel.stages import bubble

ENVIRONMENT = "OUTPACE_PIPELINE_TRACE"


class Interval(NamedTuple):
    """One micro-batch or step on one stage."""

    step: int
    """Its number, the same on all stages."""
    begin: float
    """When its computation began, once its input had arrived."""
    end: float
    waited: float = 0.0
    """Seconds before `begin` in which the stage waited for the input."""
    cpu: float = 0.0
    """Seconds of CPU time, which other programs on a busy machine do not change."""


Stages = Mapping[int, Sequence[Interval]]
"""The spans of each stage, in order of `begin`."""


class Trace:
    """Writes the spans of one rank to a file in a folder."""

    def __init__(self, stage: int, rank: int, folder: Path) -> None:
        self._path = _new_file(folder / f"rank{rank}.jsonl", {"stage": stage, "rank": rank})

    @classmethod
    def asked(cls, stage: int, rank: int) -> "Trace | None":
        """A trace if the environment variable is set, otherwise None."""
        folder = os.environ.get(ENVIRONMENT)
        return cls(stage, rank, Path(folder)) if folder else None

    def add(self, step: int, begin: float, end: float, waited: float = 0.0, cpu: float = 0.0) -> None:
        """Record one computation; times are `now()`. On a GPU, synchronize before taking the time of the end."""
        with self._path.open("a") as file:
            file.write(json.dumps(Interval(step, begin, end, waited, cpu)) + "\n")


now, cpu_time = time.perf_counter, time.process_time


def _new_file(path: Path, head: Mapping[str, int]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n")
    except OSError as error:
        raise ConfigError(f"{ENVIRONMENT}: cannot write {path} ({error}); name a folder that can be written") from error
    return path


def read(folder: Path, offsets: Mapping[int, float] | None = None) -> dict[int, list[Interval]]:
    """Read a folder of traces: the spans of each stage, as its first rank recorded them.

    `offsets`: seconds to add to the times of a rank, for ranks on machines with other clocks.
    """
    found: dict[int, tuple[int, list[Interval]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        head, *lines = map(json.loads, path.read_text().splitlines())
        stage, rank = head["stage"], head["rank"]
        if stage not in found or rank < found[stage][0]:
            found[stage] = rank, [Interval(*line) for line in lines]
    if not found:
        raise InputError(f"{folder}: no traces (rank*.jsonl) there; set {ENVIRONMENT} to this folder for the run")
    given = offsets or {}
    return {stage: shifted(spans, given.get(rank, 0.0)) for stage, (rank, spans) in sorted(found.items())}


def shifted(spans: Iterable[Interval], offset: float) -> list[Interval]:
    """Spans with an offset added, in order of `begin`."""
    moved = (span._replace(begin=span.begin + offset, end=span.end + offset) for span in spans)
    return sorted(moved, key=lambda span: span.begin)


def within(stages: Stages, begin: float, end: float) -> dict[int, list[Interval]]:
    """The spans between two times, to leave out the warm-up."""
    return {
        stage: [span for span in spans if span.begin >= begin and span.end <= end] for stage, spans in stages.items()
    }


def replayed(stages: Stages) -> dict[int, list[Interval]]:
    """The same work on an idle machine: each computation takes its CPU time and starts as early as possible."""
    found: dict[int, list[Interval]] = {}
    ready = dict[int, float]()
    for stage, spans in sorted(stages.items()):
        free = 0.0
        for span in spans:
            begin = max(free, ready.get(span.step, 0.0))
            free = ready[span.step] = begin + span.cpu
            found.setdefault(stage, []).append(Interval(span.step, begin, free, 0.0, span.cpu))
    return found


def ideal_speedup(stages: int, micro_batches: int) -> float:
    """Ideal speed-up over one stage that computes everything."""
    return stages * (1 - bubble(stages, micro_batches))


def idle_share(stages: Stages, begin: float | None = None, end: float | None = None) -> float:
    """The share of time in which the stages did not compute, from first begin to last end or as given."""
    every = [span for spans in stages.values() for span in spans]
    if not every:
        raise InputError("trace: no spans; nothing ran while it was recorded")
    first = min(span.begin for span in every) if begin is None else begin
    last = max(span.end for span in every) if end is None else end
    if last <= first:
        return 0.0
    busy = sum(max(0.0, min(span.end, last) - max(span.begin, first)) for span in every)
    return 1 - busy / (len(stages) * (last - first))


def steady_idle_share(stages: Stages) -> float:
    """The same without the fill and the drain of the pipeline."""
    if not all(stages.values()):
        return idle_share(stages)
    begin = max(spans[0].begin for spans in stages.values())
    return idle_share(stages, begin, min(max(span.end for span in spans) for spans in stages.values()))
