"""A pipeline of stages against one process with the same work: how much faster it is, and when each stage computed.

The work is prompts as long as a step, each with one new token, so that each is one micro-batch of one step. All are
handed over at once: the pipeline fills, runs and drains once. Turns of one process and of the pipeline alternate, so
that both have the same machine. Every process computes with `threads` threads.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outpace._version import __version__
from outpace.bench.drive import run
from outpace.bench.figures import Figures
from outpace.bench.shapes import build
from outpace.bench.subject import is_shape
from outpace.bench.workload import Item, latency_prompt
from outpace.config import LLMConfig
from outpace.errors import InputError
from outpace.kernels.limits import device_name
from outpace.llm import LLM
from outpace.loading.dtypes import choose_dtype, short
from outpace.parallel.stages import bubble
from outpace.parallel.trace import (
    ENVIRONMENT,
    Span,
    Stages,
    ideal_speedup,
    idle_share,
    read,
    replayed,
    steady_idle_share,
    within,
)
from outpace.runner.machine import cores, usage, used_by_others


@dataclass(frozen=True)
class Experiment:
    """What is run."""

    pp: int = 2
    """Stages."""
    micro_batches: int = 16
    tokens: int = 128
    """Of each micro-batch."""
    turns: int = 3
    """Of one process, and of the pipeline; one more of each warms up."""
    threads: int = 1
    """Of each process."""
    layers: tuple[int, ...] | None = None
    """Of each stage; None: balanced by their costs."""

    def __post_init__(self) -> None:
        least = {"pp": 2, "micro-batches": 1, "tokens": 8, "turns": 1, "threads": 1}
        for name, smallest in least.items():
            if (value := vars(self)[name.replace("-", "_")]) < smallest:
                raise InputError(f"{name}: must be at least {smallest}, got {value}")
        if self.layers is not None and len(self.layers) != self.pp:
            raise InputError(f"layers: {len(self.layers)} numbers for {self.pp} stages; give one for each stage")

    def options(self) -> dict[str, Any]:
        """Of `LLM`: a prompt fills a step, and nothing is found in the prefix cache."""
        return {
            "max_num_batched_tokens": self.tokens,
            "max_num_seqs": min(self.tokens, 2 * self.pp + 2),
            "max_model_len": self.tokens + 1,
            "enable_prefix_caching": False,
        }


@dataclass(frozen=True)
class Turn:
    """One run of all micro-batches through the pipeline, after one of the same in one process."""

    alone: float
    """Seconds of one process."""
    alone_cpu: float
    """Of its CPU time."""
    seconds: float
    stages: Stages
    others: float | None
    """Cores that other programs used while one process ran."""

    @property
    def speedup(self) -> float:
        """How many times as fast the pipeline is."""
        return self.alone / self.seconds


def pipeline(
    model: str,
    experiment: Experiment,
    *,
    random: bool = False,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Figures:
    """Measure it. Options are those of `LLM`; None is left out."""
    given = {name: value for name, value in options.items() if value is not None}
    with tempfile.TemporaryDirectory() as scratch, _threads(experiment.threads):
        say("starting the model twice: in one process, and in stages")
        folder = _folder(model, Path(scratch), random=random, **given)
        with LLM(folder, **given, **experiment.options()) as alone:
            facts = _facts(alone, model)
            stages = {"pp_size": experiment.pp, "layers": experiment.layers}
            with (
                _traced(Path(scratch) / "trace") as traces,
                LLM(folder, **given, **experiment.options(), pipeline_parallel=stages) as staged,
            ):
                turns = list(_turns(alone, staged, traces, experiment, say))
    return figures(turns, experiment, facts)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Ranks that are started inside have as many, too."""
    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        _restore("OMP_NUM_THREADS", before[1])


@contextmanager
def _traced(folder: Path) -> Iterator[Path]:
    """Pipelines that are started inside record when their stages compute."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = str(folder)
    try:
        yield folder
    finally:
        _restore(ENVIRONMENT, before)


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _folder(model: str, scratch: Path, *, random: bool, **options: Any) -> str:
    """What ranks can load: random weights are written into files."""
    if not random and not is_shape(model):
        return model
    config = LLMConfig.of(None, **{name: options[name] for name in ("dtype", "device") if name in options})
    dtype = config.compute_dtype or choose_dtype(None, config.torch_device)[0]
    made: Any = build(model, dtype, "cpu")
    made.save_pretrained(scratch / "model")
    return str(scratch / "model")


def _turns(alone: LLM, staged: LLM, traces: Path, experiment: Experiment, say: Callable[[str], None]) -> Iterator[Turn]:
    vocab = alone.engine.vocab_size or 256
    for number in range(experiment.turns + 1):
        prompts = [latency_prompt(vocab, experiment.tokens, each) for each in range(experiment.micro_batches)]
        items, before = [Item(prompt, 1) for prompt in prompts], usage()
        cpu = time.process_time()
        seconds = run(alone.engine, items).seconds
        cpu, after = time.process_time() - cpu, usage()
        begin = time.perf_counter()
        took = run(staged.engine, items).seconds
        if number == 0:
            continue  # to warm up
        others = None if before is None or after is None else used_by_others(before, after)
        turn = Turn(seconds, cpu, took, within(read(traces), begin, begin + took), others)
        say(f"turn {number} of {experiment.turns}: {turn.speedup:.2f} times as fast as one process")
        yield turn


def figures(turns: Sequence[Turn], experiment: Experiment, facts: Figures) -> Figures:
    """Of all turns; the timeline is that of the fastest one."""
    best = min(turns, key=lambda turn: turn.seconds)
    alone, ideal = min(turn.alone for turn in turns), ideal_speedup(experiment.pp, experiment.micro_batches)
    speedup = alone / best.seconds
    others = [turn.others for turn in turns if turn.others is not None]
    shown = {stage: [list(span) for span in spans] for stage, spans in best.stages.items()}
    computing = {stage: _median_ms(spans) for stage, spans in best.stages.items()}
    return {
        "one_process_seconds": [turn.alone for turn in turns],
        "pipeline_seconds": [turn.seconds for turn in turns],
        "speedup": speedup,
        "ideal_speedup": ideal,
        "of_ideal": speedup / ideal,
        "median_speedup": statistics.median(turn.speedup for turn in turns),
        "bubble": idle_share(best.stages),
        "bubble_formula": bubble(experiment.pp, experiment.micro_batches),
        "bubble_steady": steady_idle_share(best.stages),
        "stage_ms": computing,
        "by_cpu_time": _by_cpu_time(turns, experiment),
        "timeline": shown,
        "outpace": {
            **facts,
            **vars(experiment),
            "used_by_other_programs": {"cores": max(others), "of": cores()} if others else None,
        },
    }


def _by_cpu_time(turns: Sequence[Turn], experiment: Experiment) -> Figures | None:
    """What the same would be if no other program ran, from the CPU time of every computation. None: on a GPU."""
    alone, without = min(turn.alone_cpu for turn in turns), [replayed(turn.stages) for turn in turns]
    best = min(without, key=_length)
    if not _length(best):
        return None
    speedup, ideal = alone / _length(best), ideal_speedup(experiment.pp, experiment.micro_batches)
    figures = {"one_process_seconds": alone, "pipeline_seconds": _length(best), "speedup": speedup}
    return {**figures, "of_ideal": speedup / ideal, "bubble": idle_share(best)}


def _length(stages: Stages) -> float:
    return max((span.end for spans in stages.values() for span in spans), default=0.0)


def _median_ms(spans: Sequence[Span]) -> float:
    return 1e3 * statistics.median(span.end - span.begin for span in spans) if spans else 0.0


def _facts(llm: LLM, model: str) -> Figures:
    return {
        "model": Path(model).name,
        "dtype": short(llm.dtype),
        "device": device_name(llm.device),
        "versions": {"outpace": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    }
