"""The started model that is measured, with its costs and the speed of its device."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace._version import __version__
from outpace.bench.cost import Cost, cost_of
from outpace.bench.drive import run
from outpace.bench.shapes import SHAPES, build
from outpace.bench.workload import Item
from outpace.config import LLMConfig
from outpace.errors import InputError
from outpace.kernels.limits import Speed, device_name, measure_speed, peak_memory
from outpace.llm import LLM
from outpace.loading.build import Loaded, load
from outpace.loading.checkpoint import local_path
from outpace.loading.dtypes import choose_dtype, short
from outpace.loading.inspect import describe
from outpace.runner.machine import Usage, cores, usage, used_by_others


@dataclass(frozen=True)
class Subject:
    """A started model."""

    name: str
    llm: LLM
    expected_cost: Cost | None
    """The cost if all experts are equally likely; None: unknown."""
    speed: Speed
    vocab_size: int
    startup_seconds: dict[str, float]
    since: Usage | None
    """CPU time that programs had used when the model was ready."""
    touches: list[tuple[float, float]] = field(default_factory=list)
    """Tokens of warm-up steps, and how many experts of a layer each step used."""

    @property
    def cost(self) -> Cost | None:
        """The minimal cost of work, with experts as counted in warm-up steps; None: unknown."""
        expected = self.expected_cost
        return expected.with_counts(self.touches) if expected is not None and self.touches else expected

    def experts_touched(self, tokens: int) -> dict[str, Any]:
        """Figures: experts of a layer that a step of this many tokens uses, and whether they were counted."""
        cost = self.cost
        return {"experts_touched": cost and cost.touched(tokens), "experts_counted": bool(self.touches)}

    def warm_up(self, items: Sequence[Item], concurrency: int | None = None) -> None:
        """Run requests that are not measured. For a model with experts, count which ones each step uses."""
        experts, known = self.llm.engine.experts, self.expected_cost
        if experts is None or known is None or not known.experts:
            run(self.llm.engine, items, concurrency)
            return
        before, top_k = experts.read(), known.experts[0][0].top_k

        def count() -> None:
            nonlocal before
            now = experts.read()  # waits for the step, so nothing is timed here
            new, before = now - before, now
            if tokens := int(new[0].sum()) // top_k:
                self.touches.append((tokens, float((new > 0).sum(dim=1).float().mean())))

        run(self.llm.engine, items, concurrency, count)

    def tokenize(self, text: str) -> list[int]:
        if self.llm.tokenizer is None:
            raise InputError(f"dataset: {self.name} has no tokenizer, so its prompts must be token ids")
        return list(self.llm.tokenizer(text)["input_ids"])

    def facts(self) -> dict[str, Any]:
        """Facts that belong to every figure: software, machine, options, load of other programs."""
        scheduler, now = self.llm.engine.scheduler, usage()
        others = None if self.since is None or now is None else used_by_others(self.since, now)
        return {
            **software(self.name, self.llm),
            "read_bandwidth_gb_s": self.speed.bandwidth / 1e9,
            "matmul_gflop_s": self.speed.flops / 1e9,
            "startup_seconds": self.startup_seconds,
            "used_by_other_programs": None if others is None else {"cores": others, "of": cores()},
            "peak_memory_bytes": peak_memory(self.llm.device),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": self.llm.engine.max_model_len,
            "num_blocks": scheduler.pool.num_blocks,
        }


def software(name: str, llm: LLM) -> dict[str, Any]:
    """Figures: model, device, dtype and versions."""
    return {
        "model": name,
        "device": device_name(llm.device),
        "dtype": short(llm.dtype),
        "versions": {"outpace": __version__, **{each: version(each) for each in ("torch", "transformers")}},
    }


@contextmanager
def started(
    model: str | nn.Module | None,
    *,
    random: bool = False,
    weights_seed: int = 0,
    prefix_caching: bool = False,
    speed: Speed | None = None,
    catch_up: bool = True,
    **options: Any,
) -> Iterator[Subject]:
    """Start a model, and shut it down afterwards. model: any model that LLM takes, or a shape. Options are LLM's.

    Options that are None are not set. random: random weights for the config in a folder; shapes always have them.
    Prefix caching is off by default, because repeated requests would be cache hits. catch_up: finish deferred start-up
    work first (such as graph captures), so that it does not run in a measurement; it is not in the start-up seconds.
    """
    given = {name: value for name, value in options.items() if value is not None}
    config, begin = LLMConfig.of(None, **given, enable_prefix_caching=prefix_caching), time.perf_counter()
    loaded, took = _open(model, config, random=random, seed=weights_seed), time.perf_counter() - begin
    found = speed or measure_speed(config.torch_device, loaded.dtype)
    if config.torch_device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(config.torch_device)
    llm = LLM(loaded.model, tokenizer=loaded.tokenizer, config=config, dtype=loaded.dtype)
    embedding: Any = loaded.model.get_input_embeddings()  # type: ignore[operator]
    size = describe(loaded.model).vocab_size or embedding.weight.shape[0]
    seconds = {**llm.startup_seconds, "load": took, "all": llm.startup_seconds["all"] + took}
    try:
        while catch_up and llm.engine.is_behind:
            llm.engine.catch_up()
        yield Subject(loaded.name, llm, cost_of(loaded.model, config.kv_cache_dtype), found, size, seconds, usage())
    finally:
        llm.shutdown()
        del llm, loaded, embedding
        gc.collect()
        if config.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def is_shape(model: str | nn.Module | None) -> bool:
    """Whether it is the name of a shape, and no file of that name exists."""
    return isinstance(model, str) and model in SHAPES and local_path(model) is None


def _open(model: str | nn.Module | None, config: LLMConfig, *, random: bool, seed: int) -> Loaded:
    device, dtype = config.torch_device, config.compute_dtype
    if isinstance(model, nn.Module):
        own = next(model.parameters()).dtype
        return Loaded(model, None, type(model).__name__, None, dtype or own, "")
    if not random and not is_shape(model):
        return load(model, dtype=dtype, device=device)
    if model is None:
        raise InputError(f"random: name a shape ({', '.join(SHAPES)}) or a folder with a config.json")
    dtype = dtype or choose_dtype(None, device)[0]
    return Loaded(build(model, dtype, device, seed), None, Path(model).name, None, dtype, "")
