"""Start-up of a runner: choose limits, compile, measure memory, allocate pages with the rest, capture graphs."""

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
from outpace.log import chosen
from outpace.runner.budget import Budget, choose_budget, choose_limits
from outpace.runner.deferred import Deferred, first_shapes
from outpace.runner.products import tune_products
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

SAMPLED = (SamplingParams(), SamplingParams(top_p=0.9))  # one set for each sampling kernel


@dataclass
class Started:
    """A started runner, its capacity, and how long its start took."""

    runner: Runner
    budget: Budget
    num_blocks: int
    num_host_blocks: int
    num_file_blocks: int = 0
    host_block_bytes: int = 0
    """Bytes of one block in host memory or files, on this rank."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start."""

    @property
    def limits(self) -> Limits:
        return self.budget.limits


def start_runner(model: BatchModel, config: LLMConfig, max_model_len: int, salt: int = 0) -> Started:
    """Measure the memory of a step, allocate pages with the rest, capture graphs."""
    cache, limits = config.cache, choose_limits(model, config, max_model_len)
    seconds: dict[str, float] = {}
    with _timed(seconds, "host memory"):
        copies = host_level(model, config)  # checked first: it may be more than is free
    _compile(model, config, limits, seconds)
    with _timed(seconds, "budget"):
        budget = choose_budget(model, config, limits)
    limits, shortest = budget.limits, replace(budget.limits, max_num_batched_tokens=budget.streamed_tokens)
    wanted, dtype = _graph_shapes(model, config, shortest), page_dtype(config.kv_cache_dtype, model.dtype)
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
        runner = Runner(model, pages, limits, copies, salt, pads=True)
    with _timed(seconds, "graphs"):
        _capture(model, runner, wanted)
    started = Started(runner, budget, num_blocks, 0, seconds=seconds)
    if copies is None:
        return started
    num_files = 0 if copies.files is None else copies.files.num_blocks
    host = copies.host
    return replace(started, num_host_blocks=host.num_blocks, num_file_blocks=num_files, host_block_bytes=host.row_bytes)


def _capture(model: BatchModel, runner: Runner, wanted: tuple[Shape, ...]) -> None:
    """Capture the graphs that the first steps need; the others are deferred.

    With other ranks, which must capture the same graphs together, and with streamed layers, all are captured now.
    """
    begin, alone = time.perf_counter(), everyone(model).size == 1 and model.streaming is None
    first = first_shapes(wanted) if alone else wanted
    if not first or not all(runner.capture(shape, compiled=True) for shape in first):
        return
    runner.deferred = Deferred(shape for shape in wanted if shape not in first)
    later = f"; {len(runner.deferred)} of them follow after the first steps" if runner.deferred else ""
    chosen("cuda graphs", len(wanted), f"one for each size of step, in {time.perf_counter() - begin:.1f} s{later}")


def _graph_shapes(model: BatchModel, config: LLMConfig, limits: Limits) -> tuple[Shape, ...]:
    if not config.cuda_graphs or model.device.type != "cuda":
        return ()
    if not model.capturable:
        chosen("cuda graphs", "none", "this model cannot be captured")
        return ()
    return shapes(limits.max_num_seqs, limits.max_num_batched_tokens)


def _eager_shapes(model: BatchModel, limits: Limits) -> tuple[Shape, ...]:
    """Steps whose kernels are compiled at the start for a model that cannot be captured."""
    if model.device.type != "cuda" or model.streaming is None:
        return ()
    return shapes(limits.max_num_seqs, min(limits.max_num_batched_tokens, MICRO_TOKENS))


def _compile(model: BatchModel, config: LLMConfig, limits: Limits, seconds: dict[str, float]) -> None:
    """Run a step of each shape, since Triton compiles a kernel, or reads it from its cache, at the first launch.

    Kernels that are not in the cache are compiled by processes first. Meanwhile products are tuned, before memory is
    measured, since they need some. With other ranks a few shapes run one by one, in the same order on all ranks.
    """
    guess = limits.max_num_batched_tokens
    if config.scheduler.max_num_batched_tokens is None:  # the budget has not been chosen yet
        most = max(guess, min(model.max_tokens, MICRO_TOKENS))
        limits = replace(limits, max_num_batched_tokens=most)
    wanted = _graph_shapes(model, config, limits) or _eager_shapes(model, limits)
    if not wanted:
        return
    sketch, picked = model.sketch(), _of_each_kind(wanted)

    def runner() -> Runner:
        torch.cuda.set_device(model.device)
        return Runner(sketch, make_pages(sketch, config, 1), limits)

    def tune() -> None:
        with _timed(seconds, "products"):
            tune_products(model, Runner(model, make_pages(model, config, 1), limits), wanted)

    own = runner()
    if everyone(model).size > 1:
        tune()
        with _timed(seconds, "kernels loaded"):
            logits = [sketch.vocabulary.whole(own.warm_up(shape)) for shape in picked]
            if model.ranks.rank == 0 and model.stage.is_last:
                _choose_once(logits[0])
        return
    others = [shape for shape in wanted if shape not in picked]
    with _timed(seconds, "kernels found"):
        steps = (partial(own.warm_up, shape) for shape in (*picked[1:], *others))
        waited = compile_ahead((lambda: _choose_once(own.warm_up(picked[0])), *steps), meanwhile=tune)
    seconds["kernels found"] -= waited + seconds["products"]
    seconds["kernels compiled"] = waited
    with _timed(seconds, "kernels loaded"):
        with ThreadPoolExecutor(len(picked) + 1 if model.reentrant else 1) as threads:
            runs = [threads.submit(_logits, runner, shape) for shape in picked]
            made = (run.result() for run in runs)
            first = next((each for each in made if each is not None), None)
            choices = [] if first is None else [threads.submit(_sample_once, first, params) for params in SAMPLED]
        for choice in choices:
            choice.result()
        failed = [shape for shape, run in zip(picked, runs, strict=True) if run.result() is None]
        for shape in (*failed, *others):
            if _logits(lambda: own, shape) is None and shape.num_tokens <= guess:
                own.warm_up(shape)  # raises the error


def _logits(runner: Callable[[], Runner], shape: Shape) -> torch.Tensor | None:
    """Run a step of this shape; None: it needs more memory than is free."""
    try:
        return runner().warm_up(shape)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _of_each_kind(wanted: tuple[Shape, ...]) -> list[Shape]:
    """The largest and the smallest step of each kind, and a few decodes; the slowest to compile first."""
    kinds = [[shape for shape in wanted if shape.kind == kind] for kind in ("mixed", "chunks", "decode")]
    largest, smallest = ([shapes[place] for shapes in kinds if shapes] for place in (0, -1))
    few = [shape for shape in kinds[-1] if shape.num_seqs <= FEW]
    return list(dict.fromkeys([largest[0], smallest[-1], *largest, *smallest, *few]))


def _choose_once(logits: torch.Tensor) -> None:
    for params in SAMPLED:
        _sample_once(logits, params)


@torch.no_grad()
def _sample_once(logits: torch.Tensor, params: SamplingParams) -> None:
    """Sample a token: otherwise the first sampling request would wait 3.5 s for the kernel."""
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
