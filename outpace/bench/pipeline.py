"""A pipeline of stages against one process with the same work: how much faster it is, and when each stage computed.

The work is prompts as long as a step, each with one new token, so that each is one micro-batch of one step. All are
added at once: the pipeline fills, runs and drains once. Turns of one process and of the pipeline alternate, so that
both see the same machine. Every process computes with `threads` threads.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outpace.bench.drive import run
from outpace.bench.figures import Figures
from outpace.bench.shapes import build
from outpace.bench.subject import is_shape, software
from outpace.bench.workload import Item, check_least, latency_prompt
from outpace.config import LLMConfig
from outpace.errors import InputError
from outpace.llm import LLM
from outpace.loading.dtypes import choose_dtype
from outpace.parallel import trace
from outpace.parallel.stages import bubble
from outpace.parallel.trace import Span, Stages
from outpace.runner.machine import cores, usage, used_by_others


@dataclass(frozen=True)
class Experiment:
    """The sizes of the measurement."""

    pp: int = 2
    """Stages."""
    micro_batches: int = 16
    tokens: int = 128
    """Of each micro-batch."""
    turns: int = 3
    """Of one process, and of the pipeline; there is one more warm-up turn."""
    threads: int = 1
    """Of each process."""
    layers: tuple[int, ...] | None = None
    """Of each stage; None: balanced by their costs."""

    def __post_init__(self) -> None:
        check_least(2, pp=self.pp)
        check_least(1, micro_batches=self.micro_batches, turns=self.turns, threads=self.threads)
        check_least(8, tokens=self.tokens)
        if self.layers is not None and len(self.layers) != self.pp:
            raise InputError(f"layers: {len(self.layers)} numbers for {self.pp} stages; give one for each stage")

    def options(self) -> dict[str, Any]:
        """Options of `LLM`: a prompt fills a step, and there are no cache hits."""
        return {
            "max_num_batched_tokens": self.tokens,
            "max_num_seqs": min(self.tokens, 2 * self.pp + 2),
            "max_model_len": self.tokens + 1,
            "enable_prefix_caching": False,
        }


@dataclass(frozen=True)
class Turn:
    """One run of all micro-batches in one process, then through the pipeline."""

    alone: float
    """Seconds of one process."""
    alone_cpu: float
    """Its CPU time in seconds."""
    seconds: float
    """Of the pipeline."""
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
    """Run the measurement. Options are those of `LLM`; None is unset."""
    given = {name: value for name, value in options.items() if value is not None}
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch, _environment("OMP_NUM_THREADS", str(experiment.threads)):
        torch.set_num_threads(experiment.threads)
        try:
            say("starting the model twice: in one process, and in stages")
            folder = _folder(model, Path(scratch), random=random, **given)
            with LLM(folder, **given, **experiment.options()) as alone:
                facts = software(Path(model).name, alone)
                stages = {"pp_size": experiment.pp, "layers": experiment.layers}
                with (
                    _environment(trace.ENVIRONMENT, traces := f"{scratch}/trace"),
                    LLM(folder, **given, **experiment.options(), pipeline_parallel=stages) as staged,
                ):
                    turns = list(_turns(alone, staged, Path(traces), experiment, say))
        finally:
            torch.set_num_threads(before)
    return figures(turns, experiment, facts)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for this process and for the ranks that start in the meantime."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _folder(model: str, scratch: Path, *, random: bool, **options: Any) -> str:
    """A model that ranks can load: random weights are written to files."""
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
            continue  # warm-up
        others = None if before is None or after is None else used_by_others(before, after)
        turn = Turn(seconds, cpu, took, trace.within(trace.read(traces), begin, begin + took), others)
        say(f"turn {number} of {experiment.turns}: {turn.speedup:.2f} times as fast as one process")
        yield turn


def figures(turns: Sequence[Turn], experiment: Experiment, facts: Figures) -> Figures:
    """The figures of all turns; the timeline is that of the fastest turn."""
    best = min(turns, key=lambda turn: turn.seconds)
    alone, ideal = min(turn.alone for turn in turns), trace.ideal_speedup(experiment.pp, experiment.micro_batches)
    others = [turn.others for turn in turns if turn.others is not None]
    return {
        "one_process_seconds": [turn.alone for turn in turns],
        "pipeline_seconds": [turn.seconds for turn in turns],
        "speedup": alone / best.seconds,
        "ideal_speedup": ideal,
        "of_ideal": alone / best.seconds / ideal,
        "median_speedup": statistics.median(turn.speedup for turn in turns),
        "bubble": trace.idle_share(best.stages),
        "bubble_formula": bubble(experiment.pp, experiment.micro_batches),
        "bubble_steady": trace.steady_idle_share(best.stages),
        "stage_ms": {stage: _median_ms(spans) for stage, spans in best.stages.items()},
        "by_cpu_time": _by_cpu_time(turns, ideal),
        "timeline": {stage: [list(span) for span in spans] for stage, spans in best.stages.items()},
        "outpace": {
            **facts,
            **vars(experiment),
            "used_by_other_programs": {"cores": max(others), "of": cores()} if others else None,
        },
    }


def _by_cpu_time(turns: Sequence[Turn], ideal: float) -> Figures | None:
    """What the figures would be if no other program ran, from the CPU time of each computation. None: on a GPU."""
    alone, without = min(turn.alone_cpu for turn in turns), [trace.replayed(turn.stages) for turn in turns]
    best = min(without, key=_length)
    if not _length(best):
        return None
    speedup = alone / _length(best)
    figures = {"one_process_seconds": alone, "pipeline_seconds": _length(best), "speedup": speedup}
    return {**figures, "of_ideal": speedup / ideal, "bubble": trace.idle_share(best)}


def _length(stages: Stages) -> float:
    return max((span.end for spans in stages.values() for span in spans), default=0.0)


def _median_ms(spans: Sequence[Span]) -> float:
    return 1e3 * statistics.median(span.end - span.begin for span in spans) if spans else 0.0
