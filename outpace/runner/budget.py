"""The token budget of steps: as asked, or chosen by timing steps of the model on its device.

Two limits are chosen. While no request is streamed, the budget is the one with the most tokens/s. While a request is
streamed, a step takes at most 50 ms, and a chunk of a prompt makes a step of decodes 2.3 times as long.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outpace.config import LLMConfig
from outpace.inject.paged import MICRO_TOKENS, BatchModel
from outpace.kernels.gemm_library import gemm_library
from outpace.log import chosen
from outpace.runner.capture import CAPTURING, Uncapturable, captured, mend, side_stream
from outpace.runner.room import everyone, make_pages
from outpace.runner.runner import Limits, Runner
from outpace.runner.step_graphs import CHUNK_SIZES, Shape

GPU_TOKENS = 2048  # tokens of a timed step
CPU_TOKENS = 256  # tokens of a step on a CPU
STEP_SECONDS = 0.05
LEAST_STEPS = 5  # or as long as this many steps of one token per request, if that is longer
LEAST_TOKENS = 256  # of such a step, at most
OFFLINE_SECONDS = 0.5  # of a step while no request is streamed: a new request waits for it
NEAR_BEST = 0.98  # share of the best tokens/s that is good enough for a smaller step
MEMORY = 0.1  # most of the free memory that a step may take; the rest is for pages
DECODES = 32  # decodes in the step for which the chunk is sized
CHUNK_STEPS = 2.3  # how much longer a chunk makes that step (8B on an H200: 384 tokens, 10 ms instead of 4.5)
LEAST_CHUNK = 128
RUNS = 3  # of each timed step


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The token budgets of steps."""

    limits: Limits
    """Limits of the largest step."""
    streamed_tokens: int
    """Most tokens while a request is streamed. Larger steps are so long that they need no graph."""
    streamed_chunk: int | None = None
    """Most tokens of one prompt in a step with decodes, while a request is streamed; None: not measured."""
    step_seconds: float | None = None
    """The step time for which `streamed_tokens` was chosen; None: it was not chosen by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Measured seconds of steps, without attention."""

    tokens: int
    full: float
    """A step of `tokens` tokens, mostly of prompts."""
    quarter: float = 0.0
    """A step of a quarter of them. 0 here and in the next two: not timed."""
    each: float = 0.0
    """A step of one token per request."""
    few: float = 0.0
    """A step of one token for each of 32 requests."""
    affordable: int | None = None
    """Tokens of a step that takes a tenth of the free memory; None: not measured."""

    @property
    def per_token(self) -> float:
        """Seconds that one more token adds."""
        if not self.quarter:
            return self.full / self.tokens
        measured = (self.full - self.quarter) / (self.tokens - self.tokens // 4)
        return min(max(0.0, measured), self.full / self.tokens)  # a step without tokens does not take less than 0 s

    def of(self, tokens: int) -> float:
        """Seconds of a step of `tokens`: linear through the two timed steps."""
        return self.full + (tokens - self.tokens) * self.per_token


def choose_limits(model: BatchModel, config: LLMConfig, max_model_len: int) -> Limits:
    """The largest step as asked for, or a first guess."""
    seqs, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if tokens is None:
        # with streamed layers a smaller step takes as long: as long as copying the layers
        guess = GPU_TOKENS if model.streaming is None else MICRO_TOKENS
        tokens = max(seqs, guess if model.device.type == "cuda" else CPU_TOKENS)
    return Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=max_model_len)


def choose_budget(model: BatchModel, config: LLMConfig, limits: Limits) -> Budget:
    """Choose what the user did not set by timing steps; on a CPU nothing is timed."""
    asked, tokens = config.scheduler, limits.max_num_batched_tokens
    if model.device.type != "cuda":
        if asked.max_num_batched_tokens is None:
            chosen("max_num_batched_tokens", tokens, "on a CPU larger steps are not faster")
        return Budget(limits=limits, streamed_tokens=tokens)
    if asked.max_num_batched_tokens is None:
        return _for_a_time(model, config, limits, _time_steps(model, config, limits))
    timed = replace(limits, max_num_batched_tokens=min(tokens, max(GPU_TOKENS, limits.max_num_seqs)))
    if asked.target_step_ms is not None:
        return _for_a_time(model, config, limits, _time_steps(model, config, timed))
    if asked.max_chunk_beside_decodes is not None or tokens < GPU_TOKENS or model.streaming is not None:
        return Budget(limits=limits, streamed_tokens=tokens)
    chunk = _chunk(model, _time_steps(model, config, timed), tokens)
    return Budget(limits=limits, streamed_tokens=tokens, streamed_chunk=chunk)


def _for_a_time(model: BatchModel, config: LLMConfig, limits: Limits, times: Times) -> Budget:
    """The longest allowed step while streaming, and the largest step: as asked, or with the most tokens/s."""
    asked, most = config.scheduler, limits.max_num_batched_tokens
    if asked.max_num_batched_tokens is None:
        most = max(limits.max_num_seqs, model.max_tokens)
    allowed, reason = _allowed_seconds(times.each, asked.target_step_ms)
    fitting = _fitting_tokens(times.tokens, times.full, allowed, limits.max_num_seqs, most)
    streamed = everyone(model).least(fitting, model.device)
    measured = f"{times.tokens} tokens take {times.full * 1e3:.1f} ms"
    chosen("tokens of a step while a request is streamed", streamed, f"{measured}, {reason}")
    chunk = None if asked.max_chunk_beside_decodes is not None else _chunk(model, times, streamed)
    if asked.max_num_batched_tokens is None:
        most = min(most, max(streamed, times.affordable or most))
        most = everyone(model).least(_fastest(times, streamed, most), model.device)
        chosen(
            "max_num_batched_tokens",
            most,
            f"most tokens/s; {measured}, a token for each request {times.each * 1e3:.1f}",
        )
    limits = replace(limits, max_num_batched_tokens=most)
    return Budget(limits=limits, streamed_tokens=streamed, streamed_chunk=chunk, step_seconds=allowed)


def _fitting_tokens(guess: int, took: float, allowed: float, max_num_seqs: int, most: int) -> int:
    """Tokens of a step that takes at most `allowed` seconds: `guess`, which took `took`, times a power of two."""
    fitting = int(guess * 2.0 ** math.floor(math.log2(allowed / took)))
    return max(max_num_seqs, min(most, fitting))


def _allowed_seconds(each: float, target_ms: float | None) -> tuple[float, str]:
    """Seconds that a step may take while streaming, and why. each: seconds of a step of one token per request.

    A reader does not notice a wait of 50 ms. If even the smallest steps are long because all experts are read, steps of
    50 ms would read all weights for few tokens.
    """
    if target_ms is not None:
        return target_ms / 1e3, f"target_step_ms={target_ms:g}"
    if LEAST_STEPS * each <= STEP_SECONDS:
        return STEP_SECONDS, f"a step should take {STEP_SECONDS * 1e3:.0f}"
    reason = f"a step should take {LEAST_STEPS * each * 1e3:.0f}, {LEAST_STEPS} times that of a token for each request"
    return LEAST_STEPS * each, reason


def _fastest(times: Times, least: int, most: int) -> int:
    """The smallest step, of at least `least` tokens, with nearly the most tokens/s, at most half a second long.

    Requests decode in the steps in which prompts are computed, so each step also costs about what a step of decodes
    alone takes. Larger steps pay this less often.
    """
    sizes = [least]
    while (larger := 2 * sizes[-1]) <= most and times.of(larger) <= OFFLINE_SECONDS:
        sizes.append(larger)
    rates = {size: size / (times.each + times.of(size)) for size in sizes}
    return min(size for size, rate in rates.items() if rate >= NEAR_BEST * max(rates.values()))


def _chunk(model: BatchModel, times: Times, tokens: int) -> int | None:
    """Tokens of one prompt that make a step of 32 decodes 2.3 times as long; None: not timed.

    At most a quarter of a step, so that several prompts advance side by side.
    """
    allowed = CHUNK_STEPS * times.few
    fitting = [size for size in CHUNK_SIZES if times.of(size + DECODES) <= allowed]
    size = max(LEAST_CHUNK, max(fitting, default=0)) if times.few else 0
    if not (size := everyone(model).least(size, model.device)):
        return None
    size = max(1, min(size, tokens // 4))
    reason = f"{DECODES} decodes take {times.few * 1e3:.1f} ms, a step with a prompt should take {allowed * 1e3:.1f}"
    chosen("tokens of a prompt beside streamed decodes", size, reason)
    return size


def _time_steps(model: BatchModel, config: LLMConfig, limits: Limits) -> Times:
    """Time a full step, and small ones.

    Steps run from graphs, as they will later; otherwise small ones would be timed by how long the host takes to launch
    them. So without graphs the small ones are not timed. With streamed layers some are not timed either, since those
    steps take about as long at any size.
    """
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    runner = Runner(model, make_pages(model, config, 1), limits)
    full, quarter = (Shape(size, min(size, seqs), "mixed") for size in (tokens, max(1, tokens // 4)))
    each, few = (Shape(size, size, "decode") for size in (min(LEAST_TOKENS, seqs), min(DECODES, seqs)))
    wanted = (full, quarter, each, few) if model.streaming is None else (full, each)
    affordable = _affordable(lambda: runner.warm_up(full), tokens, model.device)
    kept, side = list[object](), side_stream(model.device)

    def graph(shape: Shape) -> Callable[[], object]:
        trial = runner.trial(shape, model.vocab_size)
        kept.append(trial)  # the graph reads these tensors at each replay
        with CAPTURING, gemm_library(shape.num_tokens):
            return captured(trial, pool=None, side=side, warm_ups=1)

    if config.cuda_graphs and model.capturable:
        try:
            graphs = {shape: graph(shape) for shape in wanted}
        except Uncapturable:
            mend(model.device)  # logged when steps are captured
            graphs = {}
        if everyone(model).least(len(graphs), model.device):  # all ranks must replay together
            took = {shape: _seconds(replay, model.device) for shape, replay in graphs.items()}
            small = took.get(quarter, 0.0), took.get(few, 0.0)
            times = Times(tokens=tokens, full=took[full], quarter=small[0], each=took[each], few=small[1])
            return replace(times, affordable=affordable)
    took_full = _seconds(runner.trial(full, model.vocab_size), model.device)
    return Times(tokens=tokens, full=took_full, affordable=affordable)


def _affordable(step: Callable[[], object], tokens: int, device: torch.device) -> int:
    """Run a step of `tokens`; returns how many tokens would take a tenth of the free memory."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    step()
    needed = max(1, free - torch.cuda.mem_get_info(device)[0])  # torch's allocator keeps the step's memory reserved
    return int(tokens * MEMORY * free / needed)


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step: the least of a few runs after the first, since other work on the machine only adds to them."""
    took = []
    for _ in range(1 + RUNS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - begin)
    return min(took[1:])
