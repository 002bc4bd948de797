"""When each stage of a pipeline computed: recorded by the stages, read by `outpace bench pipeline`.

Off unless the environment variable OUTPACE_PIPELINE_TRACE names a folder. Each rank then writes a file there, one line
of JSON for each micro-batch or step, at once, so that a rank that is killed leaves what it has recorded. Times are
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


class Span(NamedTuple):
    """One micro-batch or step on one stage."""

    step: int
    """Its number, the same on all stages."""
    begin: float
    """When its computation began: its input was there."""
    end: float
    waited: float = 0.0
    """Seconds before `begin` in which the stage waited for the input."""
    cpu: float = 0.0
    """Seconds of the process's CPU time, which other programs on a busy machine do not make longer."""


Stages = Mapping[int, Sequence[Span]]
"""The spans of each stage, by begin."""


class Trace:
    """The spans of one rank, in memory and, given a folder, in a file of it."""

    def __init__(self, stage: int, rank: int = 0, folder: Path | None = None) -> None:
        self.stage, self.rank = stage, rank
        self.spans: list[Span] = []
        self._path: Path | None = None
        if folder is not None:
            self._path = _new_file(folder / f"rank{rank}.jsonl", {"stage": stage, "rank": rank})

    @classmethod
    def asked(cls, stage: int, rank: int = 0) -> "Trace | None":
        """A trace where the environment asks for one."""
        folder = os.environ.get(ENVIRONMENT)
        return cls(stage, rank, Path(folder)) if folder else None

    def add(self, step: int, begin: float, end: float, waited: float = 0.0, cpu: float = 0.0) -> None:
        """Record one computation; times are `now()`. On a GPU, synchronize before taking the time of the end."""
        span = Span(step, begin, end, waited, cpu)
        self.spans.append(span)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(span) + "\n")


now, cpu_time = time.perf_counter, time.process_time


def _new_file(path: Path, head: Mapping[str, int]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n")
    except OSError as error:
        raise ConfigError(f"{ENVIRONMENT}: cannot write {path} ({error}); name a folder that can be written") from error
    return path


def read(folder: Path, offsets: Mapping[int, float] | None = None) -> dict[int, list[Span]]:
    """The stages of a folder of traces, each by its first rank.

    `offsets`: seconds to add to the times of a rank, for ranks on machines with other clocks.
    """
    found: dict[int, tuple[int, list[Span]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        head, *lines = map(json.loads, path.read_text().splitlines())
        stage, rank = head["stage"], head["rank"]
        if stage not in found or rank < found[stage][0]:
            found[stage] = rank, [Span(*line) for line in lines]
    if not found:
        raise InputError(f"{folder}: no traces (rank*.jsonl) there; set {ENVIRONMENT} to this folder for the run")
    given = offsets or {}
    return {stage: shifted(spans, given.get(rank, 0.0)) for stage, (rank, spans) in sorted(found.items())}


def shifted(spans: Iterable[Span], offset: float) -> list[Span]:
    """Spans on another clock, by begin."""
    moved = (span._replace(begin=span.begin + offset, end=span.end + offset) for span in spans)
    return sorted(moved, key=lambda span: span.begin)


def within(stages: Stages, begin: float, end: float) -> dict[int, list[Span]]:
    """What ran between two times: without warm-up."""
    return {
        stage: [span for span in spans if span.begin >= begin and span.end <= end] for stage, spans in stages.items()
    }


def replayed(stages: Stages) -> dict[int, list[Span]]:
    """The same work without other programs and waits: every computation takes its CPU time, as early as it can."""
    found: dict[int, list[Span]] = {}
    ready = dict[int, float]()
    for stage, spans in sorted(stages.items()):
        free = 0.0
        for span in spans:
            begin = max(free, ready.get(span.step, 0.0))
            free = ready[span.step] = begin + span.cpu
            found.setdefault(stage, []).append(Span(span.step, begin, free, 0.0, span.cpu))
    return found


def ideal_speedup(stages: int, micro_batches: int) -> float:
    """How many times as fast as one stage that does it all."""
    return stages * (1 - bubble(stages, micro_batches))


def idle_share(stages: Stages, begin: float | None = None, end: float | None = None) -> float:
    """The share of the stages' time in which they did not compute, from the first begin to the last end or as given."""
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
    """The same while all stages have work: without the fill and the drain."""
    if not all(stages.values()):
        return idle_share(stages)
    begin = max(spans[0].begin for spans in stages.values())
    return idle_share(stages, begin, min(max(span.end for span in spans) for spans in stages.values()))
