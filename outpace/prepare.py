"""Prepares the caller's module to run: checks everything, then replaces layers, converts and places weights."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from outpace.cache.kv_cache import check_page_dtype
from outpace.config import InferenceConfig
from outpace.config.quantization import QuantizationConfig
from outpace.errors import ConfigError, ModelError, NotSupported, OffloadError, as_field
from outpace.inject.injection import Injection, Paged, plan_injection
from outpace.inject.make import Maker
from outpace.inject.paged import MAX_TOKENS, BatchModel, PagedModel
from outpace.inject.quantize_others import check_rules, quantize_others, weights_of
from outpace.inject.quantized import QuantizedReport
from outpace.inject.split import known_splits
from outpace.inject.staged import StageCut, plan_cut
from outpace.kernels.dispatch import Kernels, choose_kernels
from outpace.loading.bars import progress
from outpace.loading.dtypes import default_dtype
from outpace.loading.fill import check_buffers, drop, fill, settle
from outpace.loading.inspect import (
    ModelInfo,
    check_model,
    describe,
)
from outpace.loading.measure_plan import measured_plan
from outpace.loading.names import match
from outpace.loading.offload import plan_streaming
from outpace.loading.open import open_weights
from outpace.loading.save import save_shards
from outpace.loading.sensitivity import weights as weights_found
from outpace.loading.skeleton import outside, with_buffers
from outpace.loading.stored import as_read, kept_names, log_converted, reasons, stored_forms
from outpace.loading.targets import Before, needed_of
from outpace.loading.weights import Source, Weights, stored_bytes
from outpace.log import chosen, logger
from outpace.offload.streaming import Streaming
from outpace.parallel.mesh import NO_MESH, Mesh, make_mesh, on_all
from outpace.parallel.pipeline import ONLY
from outpace.quant.asked import NAMED, asked_plan, asked_rules, runs_stored
from outpace.quant.fast import check_runs, runs
from outpace.quant.plan import QuantPlan
from outpace.quant.rules import Rules


@dataclass(frozen=True)
class Prepared:
    """A module on its device and in its dtype, and facts about it."""

    module: nn.Module
    info: ModelInfo
    injection: Injection | None
    dtype: torch.dtype
    device: torch.device
    seconds: Mapping[str, float]
    """Seconds of each part of `prepare`."""
    weight_bytes: int = 0
    """Bytes that were read; 0: the module had its own weights."""
    quantized: QuantizedReport | None = None
    """How its weights are quantized; None: they are in `dtype`."""
    mesh: Mesh = NO_MESH
    """The ranks that it runs on."""
    streaming: Streaming | None = None
    """Layers that are streamed to the device; None: all layers stay there."""
    cut: StageCut | None = None
    """Its stage of a pipeline; None: it is a whole model."""

    def paged(self) -> Paged | None:
        """Makes the model over pages; None: it cannot run over pages."""
        make = None if self.injection is None else self.injection.paged()
        return make if make is None or self.streaming is None else functools.partial(_streamed, make, self.streaming)


def _streamed(make: Paged, streaming: Streaming, max_positions: int) -> BatchModel:
    """A model over pages with streamed layers."""
    made = make(max_positions)
    made.reentrant = False  # slots are filled in the order of the layers
    made.capturable = made.capturable and streaming.capturable
    made.streaming = streaming
    if isinstance(made, PagedModel):
        made.max_tokens = MAX_TOKENS
    return made


Check = Callable[[ModelInfo, Injection | None], None]
"""Raises if the caller cannot use the model."""


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
    """Prepare a module as its config says. All checks come first; after them the module is changed in place.

    weights: fill an empty module with these; None: the module has its own. tokenizer: for calibration text.
    """
    check_page_dtype(config.kv_cache_dtype, config.torch_device)
    asked = asked_weights(model, config)
    weights = asked or weights
    module = check_model(model, empty=weights is not None)
    info = _look_at(module, config)
    if config.kv_cache_dtype != "auto" and not info.can_generate:
        raise ConfigError(f"quant.kv_cache_dtype: {type(module).__name__} has no KV cache; do not set it")
    kernels = choose_kernels(config.torch_device, config.kernels, deterministic)
    auto = None if config.quant is None else config.quant.auto
    rules = asked_rules(config)
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
    job = _Job(module, config, info, kernels, rules, dtype, _choose_device(config), mesh, cut, injection, sources)
    job.quant_plan = asked_plan(config)
    if (quant := config.asked_quant) is not None and quant.auto is not None:
        job.measure(quant, tokenizer)
    if job.rules.stored is None:
        check_rules(module, job.injection, kernels, job.rules)
    if (folder := _save_to(config)) is not None:
        _save(module, folder, mesh, dtype, sources, config.torch_device)
    return job.run()


@dataclass
class _Job:
    """The changes that `prepare` makes to a module after all checks."""

    module: nn.Module
    config: InferenceConfig
    info: ModelInfo
    kernels: Kernels
    rules: Rules
    dtype: torch.dtype
    device: torch.device
    mesh: Mesh
    cut: StageCut | None
    injection: Injection | None
    sources: Mapping[str, Source] | None
    """Where each weight comes from; None: the module has its own."""
    quant_plan: QuantPlan | None = None

    def measure(self, quant: QuantizationConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Measure which scheme each weight gets (`quant.auto`), and plan the injection again with these schemes."""
        if self.mesh is not NO_MESH:
            raise NotSupported(
                "quant.auto: it measures a whole model, which no rank has; measure the plan in one process, and give "
                "it as quant.plan"
            )
        module, config = self.module, self.config
        found = weights_found(weights_of(module, self.injection, self.kernels))
        if not _experts_run(module, config, self.kernels, qkv=quant.qkv.enabled):
            found = [weight for weight in found if weight.role != "experts"]
        plan = measured_plan(module, found, quant, self.info, self.sources, self.dtype, self.device, tokenizer)
        self.quant_plan, self.rules = plan, plan.rules
        self.injection = _plan(module, config, self.kernels, plan.rules, self.mesh)

    def run(self) -> Prepared:
        """Replace the layers, then load or convert the weights."""
        begin = time.perf_counter()
        if self.sources is not None and self.config.set_empty_params:
            drop(self.module)
        before = Before.of(self.module, self.dtype)
        quantized = self._replace_layers()
        sources = self.sources
        if self.cut is not None and sources is not None:
            sources = needed_of(self.module, before, sources)
        away = on_all(
            lambda: self._plan_away(before, sources),
            lambda good: bool(self.mesh.stage.peers.least(int(good), self.device)),
            OffloadError("offload: another rank cannot place its layers; see the error of that rank"),
        )
        at_fill, read = time.perf_counter(), 0
        with _put_away(away):
            if sources is None:
                settle(self.module, before, self.device, away)
            else:
                read = self._fill(before, sources, away)
        if self.cut is not None:
            self.cut.settle()
        end = time.perf_counter()
        seconds = {"inject": end - begin}
        if sources is not None:
            seconds = {"inject": at_fill - begin, "weights": end - at_fill}
        return Prepared(
            module=self.module.eval(),
            info=self.info,
            injection=self.injection,
            dtype=self.dtype,
            device=self.device,
            seconds=seconds,
            weight_bytes=read,
            quantized=quantized,
            mesh=self.mesh,
            streaming=away,
            cut=self.cut,
        )

    def _plan_away(self, before: Before, sources: Mapping[str, Source] | None) -> Streaming | None:
        """Which layers are streamed; each stage decides for its own layers."""
        mesh = replace(self.mesh, stage=ONLY)
        return plan_streaming(self.module, before, self.config, self.device, sources, mesh)

    def _replace_layers(self) -> QuantizedReport | None:
        """Replace the model's layers by ours, still without weights; returns how weights are quantized."""
        make = Maker(self.module, self.kernels, self.rules)
        if self.injection is not None:
            self.injection.apply()
        if self.cut is not None:
            self.cut.apply(self.dtype)
        quantize_others(self.module, make)
        quantized = QuantizedReport.of(self.module, self.dtype, self.quant_plan)
        if quantized is not None:
            chosen("quantization", quantized, "asked for" if self.rules.stored is None else runs_stored(self.config)[1])
        return quantized

    def _fill(self, before: Before, sources: Mapping[str, Source], away: Streaming | None) -> int:
        """Read the weights from the checkpoint, with a progress bar; the number of bytes."""
        kept = kept_names(self.module)
        note = None if self.rules.stored is not None else runs_stored(self.config)[1]
        log_converted(sources, self.dtype, kept, note=note)
        needed = as_read(sources, kept)
        with progress(needed, shown=self.mesh.first) as advance:
            fill(self.module, before, sources, self.device, advance, away)
        return stored_bytes(needed)


@contextmanager
def _put_away(away: Streaming | None) -> Iterator[None]:
    """Around the loading of weights: start to stream layers afterwards, or release their storage after an error."""
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


def _with_stored(rules: Rules, config: InferenceConfig, sources: Mapping[str, Source], dtype: torch.dtype) -> Rules:
    """Rules with the weights that run as the checkpoint stores them, if requested or the default of the device."""
    if not runs_stored(config)[0]:
        return rules
    if forms := stored_forms(sources, dtype, lambda scheme: runs(scheme, config.torch_device)):
        return replace(rules, stored=forms)
    if config.asked_quant is not None:
        why = "; ".join(sorted(reasons(sources))) or "they are not quantized"
        raise ConfigError(f"quant.scheme: 'stored', but no weights here run as they are stored: {why}; remove it")
    return rules


def asked_weights(model: nn.Module, config: InferenceConfig) -> Weights | None:
    """Open the checkpoint that a config names; None: it names none."""
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
    return "checkpoint" if config.checkpoint is not None else "checkpoint_config.checkpoint_dir"


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
    on_all(
        lambda: save_shards(module, folder, mesh.tp.size, dtype, sources) if mesh.first else None,
        lambda good: mesh.everywhere(good, device),
        ModelError("save_mp_checkpoint_path: the first rank could not write it; see the error of that rank"),
    )


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
