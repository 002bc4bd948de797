"""A runner made ready: limits chosen, memory measured, pages made of what is left, graphs captured."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from outpace.cache.file_blocks import SECTOR, FileBlocks, room_in
from outpace.cache.host_pages import HostPages
from outpace.cache.kv_cache import Pages, allocate, block_bytes, page_dtype
from outpace.config import LLMConfig
from outpace.errors import ConfigError
from outpace.inject.paged import MICRO_TOKENS, BatchModel
from outpace.kernels.compile_ahead import compile_ahead
from outpace.kernels.library import gemm_library
from outpace.log import chosen
from outpace.offload.asked import device_budget
from outpace.offload.mapped import mapped
from outpace.offload.place import even
from outpace.offload.store_memory import aligned, free_memory
from outpace.runner.capture import CAPTURING, Uncapturable, captured, mend
from outpace.runner.copies import Copies
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
SLACK = 256 << 20  # bytes of a budget that are left alone: steps of other sizes than those that were tried
GIB = 1 << 30


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
    tokens = model.ranks.least(fitting, model.device)
    chosen("max_num_batched_tokens", tokens, f"{guess} tokens take {took * 1e3:.1f} ms, {reason}")
    return replace(limits, max_num_batched_tokens=tokens), allowed


def _step_seconds(model: BatchModel, config: LLMConfig, limits: Limits) -> tuple[float, float]:
    """What a full step takes, and one of a token for each request, attention left out.

    From graphs, as steps will run: otherwise it would be what the host takes to launch them, of the small one at least.
    Where there are no graphs the small one is not timed, for this reason, and counts as nothing.
    """
    runner = Runner(model, _pages(model, config, 1), limits)
    full = Shape(limits.max_num_batched_tokens, limits.max_num_seqs, "mixed")
    vocab_size = runner.warm_up(full).shape[1]
    few = min(LEAST_TOKENS, limits.max_num_seqs)

    def graph(shape: Shape) -> Callable[[], object]:
        with CAPTURING, gemm_library(shape.num_tokens):
            return captured(runner.trial(shape, vocab_size), pool=None, warm_ups=1)

    if config.cuda_graphs and model.capturable:
        try:
            graphs = [graph(full), graph(Shape(few, few, "decode"))]
        except Uncapturable:
            mend(model.device)  # the log says so when steps are captured
            graphs = []
        if model.ranks.least(len(graphs), model.device):  # a replay waits for the other ranks
            return _seconds(graphs[0], model.device), _seconds(graphs[1], model.device)
    return _seconds(runner.trial(full, vocab_size), model.device), 0.0


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
        copies = _host_level(model, config)  # first of all: this may be more than there is
    with _timed(seconds, "kernels"):
        _compile(model, config, limits, _graph_shapes(model, config, limits) or _eager_shapes(model, limits))
        limits, step_seconds = _choose_budget(model, config, limits)
    wanted, dtype = _graph_shapes(model, config, limits), page_dtype(config.kv_cache_dtype, model.dtype)
    per_block = block_bytes(model.kv_heads, dtype, cache.block_size)
    with _timed(seconds, "memory"):
        room, what = _page_room(model, config, limits, wanted)
        num_blocks, reason = _num_blocks(model, config, limits, per_block, room, what)
        num_blocks = model.ranks.least(num_blocks, model.device)
        away = layers_on_host(model.kv_heads, dtype, cache.block_size, num_blocks, room) if _host_pages(config) else ()
    chosen("num_blocks", num_blocks, reason)
    if away:
        chosen("pages in host memory", f"those of {len(away)} layers", "attention reads them over the link")
    _check_memory(
        model, config, limits, num_blocks, per_block * (len(model.kv_heads) - len(away)) // len(model.kv_heads)
    )
    with _timed(seconds, "pages"):
        pages = _pages(model, config, num_blocks, away)
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


def _pages(model: BatchModel, config: LLMConfig, num_blocks: int, away: Sequence[int] = ()) -> Pages:
    """away: layers whose pages are in host memory."""
    dtype, elsewhere = page_dtype(config.kv_cache_dtype, model.dtype), dict.fromkeys(away, mapped)
    return allocate(model.kv_heads, num_blocks, dtype, model.device, config.cache.block_size, elsewhere=elsewhere)


def layers_on_host(
    heads: Sequence[tuple[int, int, int]], dtype: torch.dtype, block_size: int, num_blocks: int, room: int
) -> tuple[int, ...]:
    """The fewest layers whose pages have to be elsewhere, if the device has `room` bytes for pages; spread evenly.

    One such layer at a time comes to the device, for steps that read it more than once.
    """
    sizes = [num_blocks * block_bytes([each], dtype, block_size) for each in heads]
    for count in range(len(sizes)):
        away = even(count, len(sizes)) if count else ()
        window = max((sizes[layer] for layer in away), default=0)
        if sum(sizes) - sum(sizes[layer] for layer in away) + window <= room:
            return away
    return tuple(range(len(sizes)))


def _host_pages(config: LLMConfig) -> int:
    """Bytes of host memory for pages of requests that run, of all ranks together."""
    asked = config.offload.host_pages
    return int(asked * (free_memory() or 0)) if isinstance(asked, float) else asked or 0


def _on_host(gib: float, model: BatchModel) -> int:
    """Bytes that this rank may have of so much memory of the host, which all have together."""
    return int(gib * GIB) // model.ranks.size


def _check_memory(model: BatchModel, config: LLMConfig, limits: Limits, num_blocks: int, per_block: int) -> None:
    """Refuse what cannot be allocated, in words."""
    cache, seqs = config.cache, limits.max_num_seqs
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    there = host
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what trial steps have left behind is free as well
        there = torch.cuda.mem_get_info(model.device)[0]
    rows = 4 * (seqs + 1) * (limits.max_model_len + limits.max_model_len // cache.block_size)
    asked = (
        (f"num_blocks={num_blocks}", num_blocks * per_block, there),
        (f"max_num_seqs={seqs} of max_model_len={limits.max_model_len}", rows, there),
    )
    for what, wanted, room in asked:
        if wanted > room:
            raise ConfigError(f"{what}: {wanted / GIB:.1f} GiB, and there are {room / GIB:.1f}; give less")


def _host_level(model: BatchModel, config: LLMConfig) -> Copies | None:
    """Host memory and files for pages, as asked for, or an error that says how much is missing."""
    offload = config.offload
    what, wanted = _host_bytes(config)
    if not wanted:
        return None
    dtype = page_dtype(config.kv_cache_dtype, model.dtype)
    row = block_bytes(model.kv_heads, dtype, config.cache.block_size)
    if offload.kv_files:
        row = -(-row // SECTOR) * SECTOR
    if wanted // model.ranks.size < row:
        raise ConfigError(f"{what}: less than one page of {row / GIB:.3g} GiB; give more, or leave it out")
    if (free := free_memory()) is not None and wanted > free:
        raise ConfigError(
            f"{what}: {wanted / GIB:.1f} GiB of host memory for pages, and {free / GIB:.1f} are free, so "
            f"{(wanted - free) / GIB:.1f} are missing; give less"
        )
    num_blocks = model.ranks.least(wanted // model.ranks.size // row, model.device)
    files = None
    if offload.kv_files:
        assert model.ranks.size == 1, "a rule says so"
        files = _files(config, row)
    memory = aligned(num_blocks * row, pinned=model.device.type == "cuda")[: num_blocks * row]
    chosen("host pages", num_blocks, f"{what}, {row / (1 << 20):.3g} MiB each")
    return Copies(HostPages(memory.view(num_blocks, row), model.device), files)


def _files(config: LLMConfig, row: int) -> FileBlocks:
    """The file for pages, of blocks of so many bytes."""
    folder, size = config.offload.nvme, config.offload.kv_files
    assert folder is not None, "a rule says so"
    asked = int(size * room_in(folder) if isinstance(size, float) else size or 0)
    if asked < row:
        raise ConfigError(f"offload.kv_files: less than one page of {row / GIB:.3g} GiB; give more, or leave it out")
    return FileBlocks(folder, asked // row, row)


def _host_bytes(config: LLMConfig) -> tuple[str, int]:
    """What says how much host memory there is for pages, and how much, of all ranks together."""
    swap, gib, kv = config.cache.swap_space, config.offload.kv_offloading_size, config.offload.kv
    if swap or gib:
        return f"{'swap_space' if swap else 'kv_offloading_size'}={swap or gib:g}", int((swap or gib) * GIB)
    return "offload.kv", int(kv * (free_memory() or 0) if isinstance(kv, float) else kv or 0)


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
        return Runner(sketch, _pages(sketch, config, 1), limits).warm_up(shape)

    kinds = [[shape for shape in wanted if shape.kind == kind] for kind in ("decode", "chunks", "mixed")]
    few = [shape for shape in kinds[0] if shape.num_seqs <= FEW]
    picked = dict.fromkeys([*few, *(shape for shapes in kinds if shapes for shape in (shapes[0], shapes[-1]))])
    if not picked:
        return
    if model.ranks.size > 1:
        logits = [sketch.vocabulary.whole(run(shape)) for shape in picked]
        if model.ranks.rank == 0:
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


def _page_room(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> tuple[int, str]:
    """Bytes of the device for pages, and what says so; not looked at where nobody needs it."""
    cache = config.cache
    if cache.num_blocks is not None and not _host_pages(config):
        return 0, "asked for"
    if model.device.type != "cuda":
        return _on_host(cache.cpu_cache_space, model), f"cpu_cache_space={cache.cpu_cache_space:g} GiB"
    return _free_memory(model, config, limits, wanted), "memory measured free beside model, steps and graphs"


def _num_blocks(
    model: BatchModel, config: LLMConfig, limits: Limits, per_block: int, room: int, what: str
) -> tuple[int, str]:
    """How many pages there are, and why."""
    cache, more = config.cache, _host_pages(config) // model.ranks.size
    if cache.num_blocks is not None:
        if more and cache.num_blocks * per_block > room + more:
            raise ConfigError(
                f"num_blocks={cache.num_blocks}: {cache.num_blocks * per_block / GIB:.1f} GiB, and the device has "
                f"{room / GIB:.1f} and offload.host_pages {more / GIB:.1f}; give less, or raise host_pages"
            )
        return cache.num_blocks, "asked for"
    most = limits.max_num_seqs * -(-limits.max_model_len // cache.block_size)
    if room + more < per_block:
        raise ConfigError(
            f"cache: no room for a single page of {per_block / GIB:.2f} GiB ({what}); "
            "raise gpu_memory_utilization or cpu_cache_space, or lower max_num_batched_tokens or max_num_seqs"
        )
    fitting = (max(0, room) + more) // per_block
    what = f"{what}, and offload.host_pages" if more else what
    return (most, "max_num_seqs requests of max_model_len tokens") if most <= fitting else (fitting, what)


def _free_memory(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> int:
    """Bytes that Outpace may use and steps do not need: the largest are run, with and without graphs, and looked at."""
    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info(device)
    logits = _try_steps(model, config, limits, wanted)
    torch.cuda.synchronize(device)
    needed = before - torch.cuda.mem_get_info(device)[0]
    needed += sum(shape.num_seqs for shape in wanted) * logits  # each graph keeps its own
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    slack = 0 if config.offload.device_memory is None else SLACK  # a share of all memory leaves enough beside it
    return device_budget(config) - slack - (total - free) - needed


def _try_steps(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> int:
    """Run the largest steps over a handful of pages; the bytes of one row of logits."""
    runner = Runner(model, _pages(model, config, 1), limits)
    largest = Shape(limits.max_num_batched_tokens, limits.max_num_seqs, "mixed")
    logits = runner.warm_up(largest)
    scratch = [logits.float() for _ in range(4)]  # what choosing tokens takes
    kinds = {shape.kind: shape for shape in reversed(wanted)}  # the largest of each
    for kind in ("mixed" if "mixed" in kinds else "chunks", "decode"):
        if kind in kinds:
            runner.capture(kinds[kind])
    del scratch
    return logits.element_size() * logits.shape[1]


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - begin
