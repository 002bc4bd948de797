"""Compares SplitFuse with whole prompts: how long decodes wait while long prompts are prefilled beside them.

Some sequences decode all the time. Long prompts arrive at regular intervals of twice the time that one prompt takes in
a step of its own. In one run prompts are cut into chunks and fused with the decodes (the default), in the other each is
computed in a single step. Only the token budget differs: engine and arrivals are the same.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from outpace.bench.drive import Driver, EngineTrace
from outpace.bench.figures import SPLIT, WHOLE, Figures, percentile
from outpace.bench.subject import Subject
from outpace.bench.workload import Item, check_least, check_lengths, random_ids
from outpace.errors import InputError
from outpace.runner.budget import CPU_TOKENS, GPU_TOKENS
from outpace.scheduler import Scheduler

PERCENTS = (50, 95, 99)
SPACING = 2.0  # interval, as a multiple of the time of a whole prompt
STEPS = 64  # decode steps in an interval, at most


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The sizes of the measurement."""

    decoders: int = 32
    decoder_prompt: int = 64
    prompt: int = 2600
    num_prompts: int = 24
    budget: int | None = None
    """Token budget of a step with SplitFuse; None: the default of the device."""

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "budget"}
        check_least(1, **sizes)
        if (self.budget or CPU_TOKENS) <= self.decoders:
            raise InputError(f"max-num-batched-tokens: must be more than the {self.decoders} decoders")

    @property
    def whole_budget(self) -> int:
        """Token budget that fits a whole prompt and the decoders; a size that CUDA graphs are captured for."""
        return max(1 << (self.prompt + self.decoders).bit_length(), self.budget or GPU_TOKENS)

    @property
    def decoder_output(self) -> int:
        """New tokens of a decoder, enough to decode until the last prompt is prefilled."""
        budget = self.budget or CPU_TOKENS
        chunk = min(max(1, budget // 4), budget - self.decoders)
        filling = -(-self.decoders * self.decoder_prompt // chunk) + self.decoders
        return filling + (self.num_prompts + 2) * max(-(-self.prompt // chunk) + 4, STEPS)

    def options(self) -> dict[str, Any]:
        """Options of `LLM` for this experiment."""
        return {
            "max_num_seqs": self.decoders + 4,
            "max_num_batched_tokens": self.whole_budget,
            "max_model_len": max(self.prompt + 1, self.decoder_prompt + self.decoder_output),
        }


def splitfuse(subject: Subject, experiment: Experiment) -> Figures:
    """Inter-token latencies of the decoders and throughput, with SplitFuse and with whole prompts.

    The subject must be started with `experiment.options()`.
    """
    engine = subject.llm.engine
    default = GPU_TOKENS if subject.llm.device.type == "cuda" else CPU_TOKENS
    budget = experiment.budget or max(default, experiment.decoders + 1)
    lengths = Item([0] * experiment.decoder_prompt, experiment.decoder_output), Item([0] * experiment.prompt, 1)
    check_lengths(lengths, engine.max_model_len)
    ways = {
        WHOLE: (experiment.whole_budget, experiment.whole_budget),
        SPLIT: (budget, max(1, min(engine.scheduler.max_chunk_beside_decodes, budget // 4))),
    }
    found: Figures = {}
    interval = 0.0
    for name, (tokens, chunk) in ways.items():
        with _budget(engine.scheduler, tokens, chunk):
            alone = _measure(subject, experiment, 2, interval, seed=1)["median_ttft_ms"] * 1e-3
            interval = interval or SPACING * alone
            found[name] = _measure(subject, experiment, experiment.num_prompts, interval, seed=2)
        found[name] |= {"max_num_batched_tokens": tokens, "max_chunk_beside_decodes": chunk}
    return {
        **found,
        "interval": interval,
        "p95_itl_ratio": found[WHOLE]["p95_itl_ms"] / found[SPLIT]["p95_itl_ms"],
        "p99_itl_ratio": found[WHOLE]["p99_itl_ms"] / found[SPLIT]["p99_itl_ms"],
        "throughput_ratio": found[SPLIT]["output_throughput"] / found[WHOLE]["output_throughput"],
        "outpace": subject.facts(),
    }


@contextmanager
def _budget(scheduler: Scheduler, tokens: int, chunk: int) -> Iterator[None]:
    before = scheduler.sizes
    scheduler.sizes = replace(
        before, max_num_batched_tokens=tokens, max_streamed_tokens=tokens, max_chunk_beside_decodes=chunk
    )
    try:
        yield
    finally:
        scheduler.sizes = before


def _measure(subject: Subject, experiment: Experiment, num_prompts: int, interval: float, seed: int) -> Figures:
    """Measure from the first long prompt's arrival until all are prefilled and the last interval is over."""
    vocab, driver = subject.vocab_size, Driver(subject.llm.engine)

    def item(number: int, length: int, output: int) -> Item:
        return Item(random_ids(seed * 100003 + number, length, vocab), output)

    try:
        sizes = experiment.decoder_prompt, experiment.decoder_output
        decoders = [driver.add(item(number, *sizes)) for number in range(experiment.decoders)]
        while not all(len(trace.times) > 1 for trace in decoders):
            driver.step()
        begin, prompts = time.perf_counter(), list[EngineTrace]()
        while len(prompts) < num_prompts or not all(prompt.times for prompt in prompts):
            due = begin + len(prompts) * interval
            waits = interval == 0 and not all(prompt.times for prompt in prompts)
            if len(prompts) < num_prompts and time.perf_counter() >= due and not waits:
                prompts.append(driver.add(item(experiment.decoders + len(prompts), experiment.prompt, 1)))
            driver.step()
        while time.perf_counter() < begin + num_prompts * interval:
            driver.step()
        return _figures(decoders, prompts, begin, time.perf_counter())
    finally:
        driver.close()


def _figures(decoders: list[EngineTrace], prompts: list[EngineTrace], begin: float, end: float) -> Figures:
    gaps = [gap for trace in decoders for gap, at in zip(trace.gaps, trace.times[1:], strict=True) if at > begin]
    tokens = len(prompts) + sum(at > begin for trace in decoders for at in trace.times)
    return {
        **{f"p{percent}_itl_ms": percentile(gaps, percent) * 1e3 for percent in PERCENTS},
        "median_ttft_ms": percentile([prompt.ttft for prompt in prompts], 50) * 1e3,
        "output_throughput": tokens / (end - begin),
        "total_token_throughput": (tokens + sum(prompt.prompt_tokens for prompt in prompts)) / (end - begin),
        "duration": end - begin,
        "itls_ms": [round(gap * 1e3, 4) for gap in gaps],
    }
