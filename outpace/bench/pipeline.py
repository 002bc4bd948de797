"""Compares a pipeline of stages with one process: the speed-up, and when each stage computed.

Each prompt is as long as a step and has one new token, so it is one micro-batch. All are added at once: the pipeline
fills, runs and drains once. Turns of one process and of the pipeline alternate, so that other load on the machine
affects both. Every process computes with `threads` threads.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from outpace.parallel.trace import Stages
from outpace.process_wide import environment
from outpace.runner.machine import cores, usage, used_by_others


@dataclass(frozen=True)
class Experiment:
    """The sizes of the measurement."""

    pp: int = 2
    """Stages."""
    micro_batches: int = 16
    tokens: int = 128
    """Tokens of each micro-batch."""
    turns: int = 3
    """Measured turns of one process and of the pipeline, after a warm-up turn."""
    threads: int = 1
    """Threads of each process."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None: balanced by their costs."""

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
    """CPU seconds of one process."""
    seconds: float
    """Seconds of the pipeline."""
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
    with tempfile.TemporaryDirectory() as scratch:
        traces = Path(scratch) / "trace"
        variables = {"OMP_NUM_THREADS": str(experiment.threads), trace.ENVIRONMENT: str(traces)}
        torch.set_num_threads(experiment.threads)
        try:
            say("starting the model twice: in one process, and in stages")
            folder = model
            if random or is_shape(model):  # ranks load from files
                config, folder = LLMConfig.of(None, **given), f"{scratch}/model"
                dtype = config.compute_dtype or choose_dtype(None, config.torch_device)[0]
                build(model, dtype, "cpu").save_pretrained(folder)  # type: ignore[operator]
            given |= experiment.options()
            stages = {"pp_size": experiment.pp, "layers": experiment.layers}
            with (
                environment(variables),
                LLM(folder, **given) as alone,
                LLM(folder, **given, pipeline_parallel=stages) as staged,
            ):
                facts = software(Path(model).name, alone)
                turns = list(_turns(alone, staged, traces, experiment, say))
        finally:
            torch.set_num_threads(before)
    return figures(turns, experiment, facts)


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
    stages = min(turns, key=lambda turn: turn.seconds).stages
    ideal = trace.ideal_speedup(experiment.pp, experiment.micro_batches)
    best = _beside_ideal(min(turn.alone for turn in turns), min(turn.seconds for turn in turns), ideal)
    others = [turn.others for turn in turns if turn.others is not None]
    by_cpu_time = None
    without_others = min((trace.replayed(turn.stages) for turn in turns), key=_seconds)
    if _seconds(without_others):  # 0: a GPU computes
        by_cpu_time = _beside_ideal(min(turn.alone_cpu for turn in turns), _seconds(without_others), ideal)
        by_cpu_time["bubble"] = trace.idle_share(without_others)
    return {
        **best,
        "one_process_seconds": [turn.alone for turn in turns],
        "pipeline_seconds": [turn.seconds for turn in turns],
        "ideal_speedup": ideal,
        "median_speedup": statistics.median(turn.speedup for turn in turns),
        "bubble": trace.idle_share(stages),
        "bubble_formula": bubble(experiment.pp, experiment.micro_batches),
        "bubble_steady": trace.steady_idle_share(stages),
        "stage_ms": {
            stage: 1e3 * statistics.median([span.end - span.begin for span in spans] or [0.0])
            for stage, spans in stages.items()
        },
        "by_cpu_time": by_cpu_time,
        "timeline": {stage: [list(span) for span in spans] for stage, spans in stages.items()},
        "outpace": {
            **facts,
            **vars(experiment),
            "used_by_other_programs": {"cores": max(others), "of": cores()} if others else None,
        },
    }


def _beside_ideal(alone: float, seconds: float, ideal: float) -> Figures:
    speedup = alone / seconds
    return {
        "one_process_seconds": alone,
        "pipeline_seconds": seconds,
        "speedup": speedup,
        "of_ideal": speedup / ideal,
    }


def _seconds(stages: Stages) -> float:
    return max((span.end for spans in stages.values() for span in spans), default=0.0)
