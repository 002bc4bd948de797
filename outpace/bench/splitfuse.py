"""SplitFuse against whole prompts: how long decodes have to wait while long prompts come in beside them.

Some sequences decode all the time. Long prompts arrive one after another, each when the last has its first token. Once
prompts are chopped and fused with the decodes (the default), once each is computed in a single step. Both are the same
engine with another budget, so nothing else differs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outpace.bench.drive import Driver, Trace
from outpace.bench.figures import Figures, percentile
from outpace.bench.subject import Subject
from outpace.bench.workload import Item, check_lengths, random_ids
from outpace.errors import InputError
from outpace.runner.start import CPU_TOKENS, GPU_TOKENS
from outpace.scheduler import Scheduler

PERCENTS = (50, 95, 99)
WHOLE, SPLIT = "whole prompts", "SplitFuse"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Its sizes."""

    decoders: int = 32
    decoder_prompt: int = 64
    prompt: int = 2600
    num_prompts: int = 24
    budget: int | None = None
    """Tokens of a step with SplitFuse; None: the default of the device."""

    def __post_init__(self) -> None:
        for name in ("decoders", "decoder_prompt", "prompt", "num_prompts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', '-')}: must be at least 1, got {getattr(self, name)}")
        if (self.budget or CPU_TOKENS) <= self.decoders:
            raise InputError(f"max-num-batched-tokens: must be more than the {self.decoders} decoders")

    @property
    def whole_budget(self) -> int:
        """Tokens of a step that takes a whole prompt beside the decoders; a size that steps are captured for."""
        return max(1 << (self.prompt + self.decoders).bit_length(), self.budget or GPU_TOKENS)

    @property
    def decoder_output(self) -> int:
        """New tokens that a decoder may need until the last prompt is in, with some to spare."""
        budget = self.budget or CPU_TOKENS
        chunk = min(max(1, budget // 4), budget - self.decoders)
        filling = -(-self.decoders * self.decoder_prompt // chunk) + self.decoders
        return filling + self.num_prompts * (-(-self.prompt // chunk) + 4)

    def options(self) -> dict[str, Any]:
        """Options of the LLM that runs it."""
        return {
            "max_num_seqs": self.decoders + 1,
            "max_num_batched_tokens": self.whole_budget,
            "max_model_len": max(self.prompt + 1, self.decoder_prompt + self.decoder_output),
        }


def default_budget(device_type: str, decoders: int) -> int:
    """Tokens of a step where nothing is asked for."""
    return max(GPU_TOKENS if device_type == "cuda" else CPU_TOKENS, decoders + 1)


def splitfuse(subject: Subject, experiment: Experiment) -> Figures:
    """Inter-token latencies of the decoders and throughput, with SplitFuse and with whole prompts.

    The subject is started with `experiment.options()`.
    """
    engine = subject.llm.engine
    budget = experiment.budget or default_budget(subject.llm.device.type, experiment.decoders)
    lengths = Item([0] * experiment.decoder_prompt, experiment.decoder_output), Item([0] * experiment.prompt, 1)
    check_lengths(lengths, engine.max_model_len)
    ways = {SPLIT: (budget, max(1, budget // 4)), WHOLE: (experiment.whole_budget, experiment.whole_budget)}
    found: Figures = {}
    for name, (tokens, chunk) in ways.items():
        with _budget(engine.scheduler, tokens, chunk):
            _measure(subject, experiment, 1, seed=1)
            found[name] = _measure(subject, experiment, experiment.num_prompts, seed=2)
        found[name] |= {"max_num_batched_tokens": tokens, "max_chunk_beside_decodes": chunk}
    return {
        **found,
        "p99_itl_ratio": found[WHOLE]["p99_itl_ms"] / found[SPLIT]["p99_itl_ms"],
        "throughput_ratio": found[SPLIT]["total_token_throughput"] / found[WHOLE]["total_token_throughput"],
        "outpace": subject.facts(),
    }


@contextmanager
def _budget(scheduler: Scheduler, tokens: int, chunk: int) -> Iterator[None]:
    before = scheduler.max_num_batched_tokens, scheduler.max_chunk_beside_decodes
    scheduler.max_num_batched_tokens, scheduler.max_chunk_beside_decodes = tokens, chunk
    try:
        yield
    finally:
        scheduler.max_num_batched_tokens, scheduler.max_chunk_beside_decodes = before


def _measure(subject: Subject, experiment: Experiment, num_prompts: int, seed: int) -> Figures:
    """From the first long prompt's arrival to the last one's first token."""
    vocab, driver = subject.vocab_size, Driver(subject.llm.engine)

    def item(number: int, length: int, output: int) -> Item:
        return Item(random_ids(seed * 100003 + number, length, vocab), output)

    try:
        sizes = experiment.decoder_prompt, experiment.decoder_output
        decoders = [driver.add(item(number, *sizes)) for number in range(experiment.decoders)]
        while not all(len(trace.times) > 1 for trace in decoders):
            driver.step()
        begin, waits = time.perf_counter(), []
        for number in range(num_prompts):
            prompt = driver.add(item(experiment.decoders + number, experiment.prompt, 1))
            while not prompt.times:
                driver.step()
            waits.append(prompt.times[0] - prompt.arrival)
        end = time.perf_counter()
    finally:
        driver.close()
    return _figures(decoders, waits, experiment.prompt, begin, end)


def _figures(decoders: list[Trace], waits: list[float], prompt: int, begin: float, end: float) -> Figures:
    gaps = [
        later - earlier
        for trace in decoders
        for earlier, later in zip(trace.times, trace.times[1:], strict=False)
        if later > begin
    ]
    tokens = sum(time > begin for trace in decoders for time in trace.times) + len(waits)
    return {
        **{f"p{percent}_itl_ms": percentile(gaps, percent) * 1e3 for percent in PERCENTS},
        "median_ttft_ms": percentile(waits, 50) * 1e3,
        "output_throughput": tokens / (end - begin),
        "total_token_throughput": (tokens + len(waits) * prompt) / (end - begin),
        "duration": end - begin,
        "itls_ms": [round(gap * 1e3, 4) for gap in gaps],
    }
