"""A runner made ready: limits chosen, memory measured, pages made of what is left, graphs captured."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from outpace.cache.kv_cache import block_bytes, page_dtype
from outpace.config import LLMConfig
from outpace.inject.paged import MICRO_TOKENS, BatchModel
from outpace.kernels.compile_ahead import compile_ahead
from outpace.kernels.library import gemm_library
from outpace.log import chosen
from outpace.runner.capture import CAPTURING, Uncapturable, captured, mend
from outpace.runner.room import (
    check_memory,
    count_blocks,
    everyone,
    host_level,
    host_page_bytes,
    layers_on_host,
    make_pages,
    page_room,
)
from outpace.runner.runner import Limits, Runner
from outpace.runner.step_graphs import FEW, Shape, shapes
from outpace.sampling import SamplingBatch, sample
from outpace.types import Request, SamplingParams

GPU_TOKENS = 2048  # of a step that is timed
STEP_SECONDS = 0.05
LEAST_STEPS = 5  # a step may take as long as so many of a token for each request, if that is more
LEAST_TOKENS = 256  # of such a step, at most
CPU_TOKENS = 256
SAMPLED = (SamplingParams(), SamplingParams(top_p=0.9))  # one for each kernel that samples


@dataclass
class Started:
    """A runner, how much it can hold, and what its start took."""

    runner: Runner
    limits: Limits
    num_blocks: int
    num_host_blocks: int
    num_file_blocks: int = 0
    host_block_bytes: int = 0
    """Of one block in host memory or in files, of this rank."""
    step_seconds: float | None = None
    """What the tokens of a step were chosen for; None: they were not chosen for a time."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part."""


def choose_limits(model: BatchModel, config: LLMConfig, max_model_len: int) -> Limits:
    """The largest step as it is asked for, or a first guess at it."""
    seqs, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if tokens is None:
        guess = GPU_TOKENS if model.streaming is None else MICRO_TOKENS  # fewer take as long as the layers' way does
        tokens = max(seqs, guess if model.device.type == "cuda" else CPU_TOKENS)
    return Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=max_model_len)


def fitting_tokens(guess: int, took: float, allowed: float, max_num_seqs: int, most: int = MICRO_TOKENS) -> int:
    """The tokens of a step that takes at most so long, if `guess` of them took `took`: a power of two times as many."""
    fitting = int(guess * 2.0 ** math.floor(math.log2(allowed / took)))
    return max(max_num_seqs, min(most, fitting))


def allowed_seconds(least: float) -> tuple[float, str]:
    """What a step may take if one of a token for each request takes `least`, and why.

    While a reader waits 50 ms he does not notice that others are served. Where the smallest steps are long already,
    since all experts are read, so short a one would read as much for a few tokens.
    """
    if LEAST_STEPS * least <= STEP_SECONDS:
        return STEP_SECONDS, f"a step should take {STEP_SECONDS * 1e3:.0f}"
    reason = f"a step should take {LEAST_STEPS * least * 1e3:.0f}, {LEAST_STEPS} times that of a token for each request"
    return LEAST_STEPS * least, reason


def _choose_budget(model: BatchModel, config: LLMConfig, limits: Limits) -> tuple[Limits, float | None]:
    """The limits with the tokens of a step, and the seconds that these were chosen for."""
    asked, guess = config.scheduler.max_num_batched_tokens, limits.max_num_batched_tokens
    if asked is not None:
        return limits, None
    if model.device.type != "cuda":
        chosen("max_num_batched_tokens", guess, "a CPU computes more at once no faster")
        return limits, None
    took, least = _step_seconds(model, config, limits)
    allowed, reason = allowed_seconds(least)
    fitting = fitting_tokens(guess, took, allowed, limits.max_num_seqs, model.max_tokens)
    tokens = everyone(model).least(fitting, model.device)
    chosen("max_num_batched_tokens", tokens, f"{guess} tokens take {took * 1e3:.1f} ms, {reason}")
    return replace(limits, max_num_batched_tokens=tokens), allowed


def _step_seconds(model: BatchModel, config: LLMConfig, limits: Limits) -> tuple[float, float]:
    """What a full step takes, and one of a token for each request, attention left out.

    From graphs, as steps will run: otherwise it would be what the host takes to launch them, of the small one at least.
    Where there are no graphs the small one is not timed, for this reason, and counts as nothing.
    """
    runner = Runner(model, make_pages(model, config, 1), limits)
    full = Shape(limits.max_num_batched_tokens, limits.max_num_seqs, "mixed")
    runner.warm_up(full)
    few, kept = min(LEAST_TOKENS, limits.max_num_seqs), list[object]()

    def graph(shape: Shape) -> Callable[[], object]:
        trial = runner.trial(shape, model.vocab_size)
        kept.append(trial)  # the graph reads the tensors that it has
        with CAPTURING, gemm_library(shape.num_tokens):
            return captured(trial, pool=None, warm_ups=1)

    if config.cuda_graphs and model.capturable:
        try:
            graphs = [graph(full), graph(Shape(few, few, "decode"))]
        except Uncapturable:
            mend(model.device)  # the log says so when steps are captured
            graphs = []
        if everyone(model).least(len(graphs), model.device):  # a replay waits for the other ranks
            return _seconds(graphs[0], model.device), _seconds(graphs[1], model.device)
    return _seconds(runner.trial(full, model.vocab_size), model.device), 0.0


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """What a step takes that has run before: the second time of two."""
    begin = 0.0
    for _ in range(2):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def start_runner(model: BatchModel, config: LLMConfig, max_model_len: int, salt: int = 0) -> Started:
    """Measure what a step needs, make pages of the rest, capture graphs."""
    cache, limits = config.cache, choose_limits(model, config, max_model_len)
    seconds: dict[str, float] = {}
    with _timed(seconds, "host memory"):
        copies = host_level(model, config)  # first of all: this may be more than there is
    with _timed(seconds, "kernels"):
        _compile(model, config, limits, _graph_shapes(model, config, limits) or _eager_shapes(model, limits))
        limits, step_seconds = _choose_budget(model, config, limits)
    wanted, dtype = _graph_shapes(model, config, limits), page_dtype(config.kv_cache_dtype, model.dtype)
    per_block = block_bytes(model.kv_heads, dtype, cache.block_size)
    with _timed(seconds, "memory"):
        room, what = page_room(model, config, limits, wanted)
        num_blocks, reason = count_blocks(model, config, limits, per_block, room, what)
        num_blocks = everyone(model).least(num_blocks, model.device)
        beyond = host_page_bytes(config) > 0
        away = layers_on_host(model.kv_heads, dtype, cache.block_size, num_blocks, room) if beyond else ()
    chosen("num_blocks", num_blocks, reason)
    if away:
        chosen("pages in host memory", f"those of {len(away)} layers", "attention reads them over the link")
    near = per_block * (len(model.kv_heads) - len(away)) // len(model.kv_heads)
    check_memory(model, config, limits, num_blocks, near)
    with _timed(seconds, "pages"):
        pages = make_pages(model, config, num_blocks, away)
        if copies is not None:
            copies.host.bind(pages)
            copies.warm_up()
        runner = Runner(model, pages, limits, copies, salt)
    with _timed(seconds, "graphs"):
        captured = all(runner.capture(shape, compiled=True) for shape in wanted)
    if wanted and captured:
        chosen("cuda graphs", len(wanted), f"one for each size of step, in {seconds['graphs']:.1f} s")
    started = Started(runner, limits, num_blocks, 0, step_seconds=step_seconds, seconds=seconds)
    if copies is None:
        return started
    num_files = 0 if copies.files is None else copies.files.num_blocks
    host = copies.host
    return replace(started, num_host_blocks=host.num_blocks, num_file_blocks=num_files, host_block_bytes=host.row_bytes)


def _graph_shapes(model: BatchModel, config: LLMConfig, limits: Limits) -> tuple[Shape, ...]:
    if not config.cuda_graphs or model.device.type != "cuda":
        return ()
    if not model.capturable:
        chosen("cuda graphs", "none", "this model cannot be captured")
        return ()
    return shapes(limits.max_num_seqs, limits.max_num_batched_tokens)


def _eager_shapes(model: BatchModel, limits: Limits) -> tuple[Shape, ...]:
    """Steps whose kernels are compiled at the start though none is captured: those of a model that never is."""
    if model.device.type != "cuda" or model.streaming is None:
        return ()
    return shapes(limits.max_num_seqs, min(limits.max_num_batched_tokens, MICRO_TOKENS))


def _compile(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> None:
    """Run a step of each kind, side by side: a kernel is compiled, or read from the disk, when it is first launched.

    With other ranks one after the other: these run the same steps in the same order.
    """
    sketch = model.sketch()

    def run(shape: Shape) -> torch.Tensor:
        torch.cuda.set_device(model.device)
        return Runner(sketch, make_pages(sketch, config, 1), limits).warm_up(shape)

    kinds = [[shape for shape in wanted if shape.kind == kind] for kind in ("decode", "chunks", "mixed")]
    few = [shape for shape in kinds[0] if shape.num_seqs <= FEW]
    picked = dict.fromkeys([*few, *(shape for shapes in kinds if shapes for shape in (shapes[0], shapes[-1]))])
    if not picked:
        return
    if everyone(model).size > 1:
        logits = [sketch.vocabulary.whole(run(shape)) for shape in picked]
        if model.ranks.rank == 0 and model.stage.is_last:
            _choose_once(logits[0])
        return
    first, *others = picked
    compile_ahead([lambda: _choose_once(run(first)), *(partial(run, shape) for shape in reversed(others))])
    with ThreadPoolExecutor(len(picked) + 1 if model.reentrant else 1) as threads:
        steps = [threads.submit(run, shape) for shape in picked]
        choices = [threads.submit(_sample_once, steps[0].result(), params) for params in SAMPLED]
        for step in steps:
            step.result()
        for choice in choices:
            choice.result()


def _choose_once(logits: torch.Tensor) -> None:
    for params in SAMPLED:
        _sample_once(logits, params)


@torch.no_grad()
def _sample_once(logits: torch.Tensor, params: SamplingParams) -> None:
    """Choose a token: without this the first request that samples would wait 3.5 s for the kernel."""
    torch.cuda.set_device(logits.device)
    batch = SamplingBatch.of(
        [Request(request_id="", prompt_token_ids=(0,), params=params)], logits.shape[1], logits.device
    )
    history = torch.zeros(1, 1, dtype=torch.int32, device=logits.device)
    sample(logits[:1], batch, history, torch.ones(1, dtype=torch.int64, device=logits.device))


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - begin
