"""Sizes the KV cache: how many pages fit beside model, steps and graphs, and where they are allocated."""

import os
from collections.abc import Sequence

import torch

from outpace.cache.file_blocks import GIB, SECTOR, FileBlocks, room_in
from outpace.cache.host_pages import HostPages
from outpace.cache.kv_cache import Pages, allocate, block_bytes, page_dtype
from outpace.config import LLMConfig
from outpace.errors import ConfigError
from outpace.inject.paged import BatchModel
from outpace.log import chosen
from outpace.offload.asked import device_budget
from outpace.offload.place import even
from outpace.offload.store_memory import aligned, free_memory, mapped
from outpace.parallel.group import Group
from outpace.runner.copies import Copies
from outpace.runner.runner import Limits, Runner
from outpace.runner.step_graphs import Shape

SLACK = 256 << 20  # bytes kept free for steps of sizes that were not tried


def everyone(model: BatchModel) -> Group:
    """The group of all ranks that run the same batches, in all stages."""
    return model.ranks if model.stage.count == 1 else model.stage.everyone


def page_room(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> tuple[int, str]:
    """Device bytes for pages, and what determined them; measured only if needed."""
    cache = config.cache
    if cache.num_blocks is not None and not host_page_bytes(config):
        return 0, "asked for"
    if model.device.type != "cuda":
        return on_host(cache.cpu_cache_space, model), f"cpu_cache_space={cache.cpu_cache_space:g} GiB"
    return _free_memory(model, config, limits, wanted), "memory measured free beside model, steps and graphs"


def count_blocks(
    model: BatchModel, config: LLMConfig, limits: Limits, per_block: int, room: int, what: str
) -> tuple[int, str]:
    cache, more = config.cache, host_page_bytes(config) // everyone(model).size
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
    if 0 < more < per_block:
        raise ConfigError(
            f"offload.host_pages: less than one page of {per_block / GIB:.3g} GiB; give more, or remove it"
        )
    fitting = (max(0, room) + more) // per_block
    what = f"{what}, and offload.host_pages" if more else what
    return (most, "max_num_seqs requests of max_model_len tokens") if most <= fitting else (fitting, what)


def check_memory(model: BatchModel, config: LLMConfig, limits: Limits, num_blocks: int, per_block: int) -> None:
    """Raise a clear error if the pages cannot be allocated."""
    cache, seqs = config.cache, limits.max_num_seqs
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    there = host
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # memory cached by trial steps counts as free
        there = torch.cuda.mem_get_info(model.device)[0]
    rows = 4 * (seqs + 1) * (limits.max_model_len + limits.max_model_len // cache.block_size)
    given = f"num_blocks={num_blocks}"
    if cache.num_blocks is None:
        way = f"cpu_cache_space={cache.cpu_cache_space:g}" if model.device.type == "cpu" else "gpu_memory_utilization"
        given = f"{way}, {num_blocks} pages of requests of max_model_len={limits.max_model_len}"
    asked = (
        (given, num_blocks * per_block, there),
        (f"max_num_seqs={seqs} of max_model_len={limits.max_model_len}", rows, there),
    )
    for what, wanted, room in asked:
        if wanted > room:
            raise ConfigError(f"{what}: {wanted / GIB:.1f} GiB, and there are {room / GIB:.1f}; give less")


def layers_on_host(
    heads: Sequence[tuple[int, int, int]], dtype: torch.dtype, block_size: int, num_blocks: int, room: int
) -> tuple[int, ...]:
    """The fewest layers whose pages must be in host memory if the device has `room` bytes for pages; spread evenly.

    Steps that read such a layer more than once copy it to the device, one layer at a time.
    """
    sizes = [num_blocks * block_bytes([each], dtype, block_size) for each in heads]
    for count in range(len(sizes)):
        away = even(count, len(sizes)) if count else ()
        window = max((sizes[layer] for layer in away), default=0)
        if sum(sizes) - sum(sizes[layer] for layer in away) + window <= room:
            return away
    return tuple(range(len(sizes)))


def make_pages(model: BatchModel, config: LLMConfig, num_blocks: int, away: Sequence[int] = ()) -> Pages:
    """Allocate the pages. away: layers whose pages are in host memory."""
    dtype, elsewhere = page_dtype(config.kv_cache_dtype, model.dtype), dict.fromkeys(away, mapped)
    return allocate(model.kv_heads, num_blocks, dtype, model.device, config.cache.block_size, elsewhere=elsewhere)


def host_page_bytes(config: LLMConfig) -> int:
    """Host memory bytes for the pages of running requests, of all ranks together."""
    asked, free = config.offload.host_pages, free_memory()
    found = int(asked * (free or 0)) if isinstance(asked, float) else asked or 0
    if free is not None and found > free:
        raise ConfigError(
            f"offload.host_pages: {found / GIB:.1f} GiB, and {free / GIB:.1f} GiB of host memory are free; give less"
        )
    return found


def on_host(gib: float, model: BatchModel) -> int:
    """This rank's share of `gib` GiB of host memory, in bytes."""
    return int(gib * GIB) // everyone(model).size


def host_level(model: BatchModel, config: LLMConfig) -> Copies | None:
    """The cache levels in host memory and files, as asked for; raises an error that says how much is missing."""
    offload = config.offload
    what, wanted = _host_bytes(config)
    if not wanted:
        return None
    dtype = page_dtype(config.kv_cache_dtype, model.dtype)
    row = block_bytes(model.kv_heads, dtype, config.cache.block_size)
    if offload.kv_files:
        row = -(-row // SECTOR) * SECTOR
    if wanted // everyone(model).size < row:
        raise ConfigError(f"{what}: less than one page of {row / GIB:.3g} GiB; give more, or remove it")
    if (free := free_memory()) is not None and wanted > free:
        raise ConfigError(
            f"{what}: {wanted / GIB:.1f} GiB of host memory for pages, and {free / GIB:.1f} are free, so "
            f"{(wanted - free) / GIB:.1f} are missing; give less"
        )
    num_blocks = everyone(model).least(wanted // everyone(model).size // row, model.device)
    files = None
    if offload.kv_files:
        assert everyone(model).size == 1, "checked by config.rules"
        files = _files(config, row)
    memory = aligned(num_blocks * row, pinned=model.device.type == "cuda")[: num_blocks * row]
    chosen("host pages", num_blocks, f"{what}, {row / (1 << 20):.3g} MiB each")
    return Copies(HostPages(memory.view(num_blocks, row), model.device), files)


def _host_bytes(config: LLMConfig) -> tuple[str, int]:
    """The option that sets the host memory for pages, and its bytes, of all ranks together."""
    swap, gib, kv = config.cache.swap_space, config.offload.kv_offloading_size, config.offload.kv
    if swap or gib:
        return f"{'swap_space' if swap else 'kv_offloading_size'}={swap or gib:g}", int((swap or gib) * GIB)
    return "offload.kv", int(kv * (free_memory() or 0) if isinstance(kv, float) else kv or 0)


def _files(config: LLMConfig, row: int) -> FileBlocks:
    """The file for pages, in blocks of `row` bytes."""
    folder, size = config.offload.nvme, config.offload.kv_files
    assert folder is not None, "checked by config.rules"
    asked = int(size * room_in(folder) if isinstance(size, float) else size or 0)
    if asked < row:
        raise ConfigError(f"offload.kv_files: less than one page of {row / GIB:.3g} GiB; give more, or remove it")
    return FileBlocks(folder, asked // row, row)


def _free_memory(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> int:
    """Bytes that Outpace may use, minus what steps need: the largest are run and measured, with and without graphs."""
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
    slack = 0 if config.offload.device_memory is None else SLACK  # a share of all memory leaves enough free anyway
    return device_budget(config) - slack - (total - free) - needed


def _try_steps(model: BatchModel, config: LLMConfig, limits: Limits, wanted: tuple[Shape, ...]) -> int:
    """Capture the largest graphs over a handful of pages and run the largest step; the bytes of one row of logits."""
    runner = Runner(model, make_pages(model, config, 1), limits)
    kinds = {shape.kind: shape for shape in reversed(wanted)}  # the largest of each
    for kind in ("mixed" if "mixed" in kinds else "chunks", "decode"):
        if kind in kinds:
            runner.capture(kinds[kind])
    # After the captures, because each of them empties torch's cache: this step's memory is needed in addition.
    logits = runner.warm_up(Shape(limits.max_num_batched_tokens, limits.max_num_seqs, "mixed"))
    scratch = [logits.float() for _ in range(4)]  # as much as sampling takes
    del scratch
    return logits.element_size() * logits.shape[1]
