"""Somebody's module made ready: looked at, converted, injected, placed. What cannot work is refused beforehand."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from outpace.cache.kv_cache import check_page_dtype
from outpace.config import InferenceConfig, LLMConfig
from outpace.errors import ConfigError, ModelError, NotSupported, OffloadError, OutpaceError, as_field
from outpace.inject.make import Maker
from outpace.inject.paged import MAX_TOKENS, BatchModel, PagedModel
from outpace.inject.quantize_others import check_rules, quantize_others, weights_of
from outpace.inject.quantized import Quantized
from outpace.inject.split import known_splits
from outpace.inject.staged import Cut, plan_cut, stages_of
from outpace.inject.start import Injection, Paged, plan_injection
from outpace.kernels.dispatch import Kernels, choose_kernels
from outpace.loading.bars import progress
from outpace.loading.build import Found, Loaded, find
from outpace.loading.dtypes import default_dtype
from outpace.loading.fill import Before, check_buffers, drop, fill, needed_of, settle
from outpace.loading.inspect import (
    ModelInfo,
    check_model,
    describe,
    encoder_decoder,
    generation_config,
    token_list,
)
from outpace.loading.measure_plan import measured_plan
from outpace.loading.names import match
from outpace.loading.offload import plan_streaming
from outpace.loading.open import open_weights
from outpace.loading.sampling_defaults import sampling_defaults
from outpace.loading.save import save_shards
from outpace.loading.sensitivity import weights as weights_found
from outpace.loading.skeleton import outside, with_buffers
from outpace.loading.stored import as_read, kept_names, log_converted, reasons, stored_forms
from outpace.loading.weights import Source, Weights, stored_bytes
from outpace.log import chosen, logger
from outpace.offload.streaming import Streaming
from outpace.parallel.mesh import NO_MESH, Mesh, make_mesh
from outpace.parallel.pipeline import ONLY
from outpace.quant.asked import NAMED, asked_plan, asked_rules, runs_stored
from outpace.quant.fast import check_runs, runs
from outpace.quant.plan import QuantPlan
from outpace.quant.rules import Rules

DEFAULT_LENGTH = 2048  # tokens of a request where neither the model nor the caller knows a limit


@dataclass(frozen=True)
class Prepared:
    """A module that is where it runs, in what it computes in."""

    module: nn.Module
    info: ModelInfo
    injection: Injection | None
    dtype: torch.dtype
    device: torch.device
    seconds: Mapping[str, float]
    """What this took, by part."""
    weight_bytes: int = 0
    """That were read; 0: the module had its own."""
    quantized: Quantized | None = None
    """What became of its weights; None: they are in `dtype`."""
    mesh: Mesh = NO_MESH
    """The ranks that it runs on."""
    streaming: Streaming | None = None
    """Its layers that do not stay on the device; None: all do."""
    cut: Cut | None = None
    """The stage of a pipeline that it is; None: it is a whole model."""

    def paged(self) -> Paged | None:
        """How it runs over pages; None: it has no such form."""
        make = None if self.injection is None else self.injection.paged()
        return make if make is None or self.streaming is None else functools.partial(_streamed, make, self.streaming)


def _streamed(make: Paged, streaming: Streaming, max_positions: int) -> BatchModel:
    """A model over pages whose layers come and go."""
    made = make(max_positions)
    made.reentrant = False  # layers have their slots in one order
    made.capturable = made.capturable and streaming.capturable
    made.streaming = streaming
    if isinstance(made, PagedModel):
        made.max_tokens = MAX_TOKENS
    return made


Check = Callable[[ModelInfo, Injection | None], None]
"""Raises if what was found out about a model does not do."""


@outside()
def prepare(
    model: nn.Module,
    config: InferenceConfig,
    *,
    weights: Weights | None = None,
    deterministic: bool = False,
    check: Check | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Prepared:
    """Make a module ready as its config says; it is changed in place, once nothing speaks against it.

    weights: what an empty module is filled with; None: it has its own. tokenizer: what calibration text is read with.
    """
    check_page_dtype(config.kv_cache_dtype, config.torch_device)
    asked = asked_weights(model, config)
    weights = asked or weights
    module = check_model(model, empty=weights is not None)
    info = _look_at(module, config)
    if config.kv_cache_dtype != "auto" and not info.can_generate:
        raise ConfigError(f"quant.kv_cache_dtype: {type(module).__name__} keeps no keys and values; leave it out")
    kernels, rules = choose_kernels(config.torch_device, config.kernels, deterministic), asked_rules(config)
    auto = None if config.quant is None else config.quant.auto
    check_runs([*rules.schemes, *(NAMED[name] for name in (auto.schemes if auto else ()))], config.torch_device)
    dtype = _choose_dtype(config)
    with as_field("model" if asked is None else _named_by(config)):
        sources = None if weights is None else match(module, weights, dtype)
    rules = _with_stored(rules, config, sources or {}, dtype)
    mesh = make_mesh(config)
    cut = plan_cut(module, mesh, config.pipeline_parallel.layers)
    injection = _plan(module, config, kernels, rules, mesh)
    if check is not None:
        check(info, injection)
    if sources is not None:
        check_buffers(module, sources)
    device, plan = _choose_device(config), asked_plan(config)
    if (quant := config.asked_quant) is not None and quant.auto is not None:
        if mesh is not NO_MESH:
            raise NotSupported(
                "quant.auto: it measures a whole model, which no rank has; measure the plan in one process, and give "
                "it as quant.plan"
            )
        made = weights_found(weights_of(module, injection, kernels))
        if not _experts_run(module, config, kernels, qkv=quant.qkv.enabled):
            made = [weight for weight in made if weight.role != "experts"]
        plan = measured_plan(module, made, quant, info, sources, dtype, device, tokenizer)
        rules = plan.rules
        injection = _plan(module, config, kernels, rules, mesh)
    if rules.stored is None:
        check_rules(module, injection, kernels, rules)
    if (folder := _save_to(config)) is not None:
        _save(module, folder, mesh, dtype, sources, config.torch_device)
    begin = time.perf_counter()
    if sources is not None and config.set_empty_params:
        drop(module)
    before, make = Before.of(module, dtype), Maker(module, kernels, rules)
    if injection is not None:
        injection.apply()
    if cut is not None:
        cut.apply(dtype)
    quantize_others(module, make)
    if (quantized := Quantized.of(module, dtype, plan)) is not None:
        chosen("quantization", quantized, "asked for" if rules.stored is None else runs_stored(config)[1])
    if cut is not None and sources is not None:
        sources = needed_of(module, before, sources)
    away = _plan_away(module, before, config, device, sources, mesh)
    known: dict[str, Any] = {"quantized": quantized, "mesh": mesh, "streaming": away, "cut": cut}
    if sources is None:
        with _put_away(away):
            settle(module, before, device, away)
        if cut is not None:
            cut.settle()
        seconds = {"inject": time.perf_counter() - begin}
        return Prepared(module.eval(), info, injection, dtype, device, seconds, **known)
    kept = kept_names(module)
    log_converted(sources, dtype, kept, note=None if rules.stored is not None else runs_stored(config)[1])
    needed = as_read(sources, kept)
    at_fill = time.perf_counter()
    with _put_away(away), progress(needed, shown=mesh.first) as advance:
        fill(module, before, sources, device, advance, away)
    if cut is not None:
        cut.settle()
    seconds = {"inject": at_fill - begin, "weights": time.perf_counter() - at_fill}
    return Prepared(module.eval(), info, injection, dtype, device, seconds, stored_bytes(needed), **known)


def _plan_away(
    module: nn.Module,
    before: Before,
    config: InferenceConfig,
    device: torch.device,
    sources: Mapping[str, Source] | None,
    mesh: Mesh,
) -> Streaming | None:
    """Which layers do not stay: each stage finds that for its own, and fails if another does."""
    problem: OutpaceError | None = None
    away = None
    try:
        away = plan_streaming(module, before, config, device, sources, replace(mesh, stage=ONLY))
    except OutpaceError as error:
        problem = error
    good = mesh.stage.peers.least(int(problem is None), device)
    if problem is not None:
        raise problem
    if not good:
        raise OffloadError("offload: another rank cannot place its layers, and says why")
    return away


@contextmanager
def _put_away(away: Streaming | None) -> Iterator[None]:
    """While weights are loaded: layers that do not stay are put away, and streamed from then on."""
    try:
        yield
        if away is not None:
            away.start()
    except BaseException:
        if away is not None:
            away.abandon()
        raise


def _experts_run(module: nn.Module, config: InferenceConfig, kernels: Kernels, *, qkv: bool) -> bool:
    """Whether the experts of a model may be quantized, if it has any."""
    rules = Rules(NAMED["int8"], qkv=qkv)
    try:
        check_rules(module, _plan(module, config, kernels, rules), kernels, rules)
    except NotSupported as error:
        chosen("experts", "as they are", str(error))
        return False
    return True


@outside()
def find_plan(model: str | os.PathLike[str] | None, config: LLMConfig) -> QuantPlan:
    """Measure which scheme each weight of a model gets (`quant.auto`), without making it ready to run."""
    assert config.quant is not None, "asked for"
    assert config.quant.auto is not None, "asked for"
    found = _find(model, config, tokenizer=config.quant.reads_text)
    info, sources = describe(found.model, config.config), match(found.model, found.weights, found.dtype)
    made = weights_found(weights_of(found.model, None, choose_kernels(config.torch_device, config.kernels)))
    if any(weight.role == "experts" for weight in made):
        raise NotSupported(
            f"auto: {found.name} has experts, for whose plans the layout that is written has no form; give quant.auto "
            "when the model is loaded, or choose a scheme"
        )
    device = config.torch_device
    return measured_plan(found.model, made, config.quant, info, sources, found.dtype, device, found.tokenizer)


def _with_stored(rules: Rules, config: InferenceConfig, sources: Mapping[str, Source], dtype: torch.dtype) -> Rules:
    """Rules with what runs from the checkpoint's own bits, if that is asked for, or usual on the device."""
    if not runs_stored(config)[0]:
        return rules
    if forms := stored_forms(sources, dtype, lambda scheme: runs(scheme, config.torch_device)):
        return replace(rules, stored=forms)
    if config.asked_quant is not None:
        why = "; ".join(sorted(reasons(sources))) or "they are not quantized"
        raise ConfigError(f"quant.scheme: 'stored', but no weights here run as they are stored: {why}; leave it out")
    return rules


def asked_weights(model: nn.Module, config: InferenceConfig) -> Weights | None:
    """The checkpoint that a config names, opened; None: it names none."""
    more = config.checkpoint_config
    source = config.checkpoint if config.checkpoint is not None else more.checkpoint_dir
    if source is None or not isinstance(model, nn.Module):
        return None
    with_buffers(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    base = config.base_dir or more.base_dir or ""
    size, splits = config.training_mp_size, functools.partial(known_splits, model)
    field = _named_by(config)
    return open_weights(source, base_dir=base, training_mp_size=size, shapes=shapes, splits=splits, field=field)


def _named_by(config: InferenceConfig) -> str:
    """The option that names the checkpoint."""
    return "checkpoint" if config.checkpoint is not None else "checkpoint_config.checkpoint_dir"


@dataclass(frozen=True)
class PagedParts:
    """A model that runs batches over pages, and what is known of it."""

    model: BatchModel
    module: nn.Module
    """The same model as Hugging Face calls it, with its layers replaced."""
    config: LLMConfig
    name: str
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int | None
    max_model_len: int
    dtype: torch.dtype
    dtype_reason: str
    device: torch.device
    seconds: dict[str, float]
    """What this took, by part."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What requests get where they do not say, by names of SamplingParams."""
    weight_bytes: int = 0
    """That were read to load it."""
    quantized: Quantized | None = None
    """What became of its weights; None: they are in `dtype`."""
    streaming: Streaming | None = None
    """Its layers that do not stay on the device; None: all do."""


def find_stages(
    model: str | os.PathLike[str] | None, config: LLMConfig, tokenizer: bool | PreTrainedTokenizerBase
) -> Found:
    """A model without its weights, which can be cut into the stages that are asked for."""
    found, asked = _find(model, config, _reads(config, tokenizer)), config.pipeline_parallel
    stages_of(found.model, asked.pp_size, asked.layers)
    return found


def _reads(config: LLMConfig, tokenizer: bool | PreTrainedTokenizerBase) -> bool:
    """Whether the model's tokenizer is needed."""
    return tokenizer is True or (tokenizer is False and config.quant is not None and config.quant.reads_text)


def load_paged(
    model: str | os.PathLike[str] | nn.Module | Found | None,
    asked: LLMConfig,
    *,
    tokenizer: bool | PreTrainedTokenizerBase = True,
) -> PagedParts:
    """A model by name, from a folder, a .gguf file, live, or found already, made ready to run over pages.

    tokenizer: one to use instead of the model's; False leaves it out, for an engine that sees token ids alone (unless
    a text has to be read for quantization).
    """
    check_page_dtype(asked.kv_cache_dtype, asked.torch_device)
    begin = time.perf_counter()
    loaded: Loaded | Found
    if isinstance(model, Found):
        loaded = model
    else:
        loaded = _live(model, asked) if isinstance(model, nn.Module) else _find(model, asked, _reads(asked, tokenizer))
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        loaded = replace(loaded, tokenizer=tokenizer)
    info = describe(loaded.model, asked.config)
    if info.kind == "encoder-decoder":
        raise encoder_decoder(loaded.name)
    if not info.can_generate:
        raise ModelError(f"model: {loaded.name} is not a generative model; call it with outpace.init_inference")
    config = LLMConfig(**{**asked.given(), "dtype": loaded.dtype, "quant": asked.asked_quant or asked.quant})
    at_load = time.perf_counter()

    def check(info: ModelInfo, injection: Injection | None) -> None:
        length = _max_model_len(info, config)
        if injection is None or not injection.has_pages(length):
            raise ModelError(f"model: {loaded.name} has no form over pages; call it with outpace.init_inference")
        if config.deterministic and (reason := injection.varies()):
            raise NotSupported(f"deterministic: {loaded.name} cannot promise it: {reason}; leave deterministic out")

    weights = loaded.weights if isinstance(loaded, Found) else None
    options: dict[str, Any] = {"deterministic": config.deterministic, "check": check, "tokenizer": loaded.tokenizer}
    prepared = prepare(loaded.model, config, weights=weights, **options)
    paged = prepared.paged()
    assert paged is not None, "checked before"
    length, own = _max_model_len(prepared.info, config), generation_config(prepared.module)
    return PagedParts(
        model=paged(length),
        module=prepared.module,
        config=config,
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        eos_token_ids=tuple(token_list("eos_token_id", own.eos_token_id)),
        vocab_size=prepared.info.vocab_size,
        max_model_len=length,
        dtype=prepared.dtype,
        dtype_reason=loaded.dtype_reason,
        device=prepared.device,
        seconds={"load": at_load - begin, **prepared.seconds},
        sampling=sampling_defaults(config.generation_config, own, loaded.sampling if isinstance(loaded, Found) else {}),
        weight_bytes=prepared.weight_bytes,
        quantized=prepared.quantized,
        streaming=prepared.streaming,
    )


def _find(model: str | os.PathLike[str] | None, config: LLMConfig, tokenizer: bool) -> Found:
    if not isinstance(model, str | os.PathLike | None):
        raise ModelError(f"model: expected a name, a path or a torch.nn.Module, got {type(model).__name__}")
    source = None if model is None else os.fspath(model)
    return find(source, dtype=config.compute_dtype, device=config.torch_device, tokenizer=tokenizer)


def _live(model: nn.Module, config: LLMConfig) -> Loaded:
    """A module the caller made: its own dtype, unless another is asked for."""
    own = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    asked = config.compute_dtype
    dtype, reason = (asked, "asked for") if asked else (own, "the module's own")
    return Loaded(model, None, type(model).__name__, None, dtype, reason)


def _max_model_len(info: ModelInfo, config: LLMConfig) -> int:
    asked, own = config.max_out_tokens, info.max_positions
    if asked is not None and own is not None and asked > own:
        raise ConfigError(f"max_model_len: {asked} is more than the {own} positions of the model; ask for fewer")
    return asked or own or DEFAULT_LENGTH


def _look_at(module: nn.Module, config: InferenceConfig) -> ModelInfo:
    info = describe(module, config.config, find_experts=config.moe.enabled)
    logger.info("model: %s (%s, %s experts)", type(module).__name__, info.kind, info.num_experts or "no")
    return info


def _plan(
    module: nn.Module, config: InferenceConfig, kernels: Kernels, rules: Rules, mesh: Mesh = NO_MESH
) -> Injection | None:
    if not config.replace_with_kernel_inject and not config.injection_policy and mesh is NO_MESH:
        return None
    with as_field("tensor_parallel.tp_size", known_as="tensor parallelism"):
        return plan_injection(module, config, kernels, rules, mesh)


def _save_to(config: InferenceConfig) -> str | None:
    """The folder that shards of the module are written to, if any."""
    own, more = config.save_mp_checkpoint_path, config.checkpoint_config.save_mp_checkpoint_path
    return more if own is None else own


def _save(
    module: nn.Module,
    folder: str,
    mesh: Mesh,
    dtype: torch.dtype,
    sources: Mapping[str, Source] | None,
    device: torch.device,
) -> None:
    """Write the shards of all ranks, in one of them; the others wait for it."""
    error: Exception | None = None
    if mesh.first:
        try:
            save_shards(module, folder, mesh.tp.size, dtype, sources)
        except Exception as problem:
            error = problem
    written = mesh.everywhere(error is None, device)
    if error is not None:
        raise error
    if not written:
        raise ModelError("save_mp_checkpoint_path: the first rank could not write it, and says why")


def _choose_dtype(config: InferenceConfig) -> torch.dtype:
    asked = config.compute_dtype
    dtype, reason = (asked, "asked for") if asked else default_dtype(config.torch_device)
    chosen("dtype", dtype, reason)
    return dtype


def _choose_device(config: InferenceConfig) -> torch.device:
    if config.keep_module_on_host:
        device, reason = torch.device("cpu"), "keep_module_on_host"
    else:
        device, reason = config.torch_device, "asked for" if config.device else "the first GPU, or else the CPU"
    chosen("device", device, reason)
    return device
