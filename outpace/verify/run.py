"""Runs the same prompts through a plain model, through a float32 copy if its dtype has 16 bits, and injected."""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace.config import InferenceConfig
from outpace.engine import InferenceEngine
from outpace.errors import InputError, ModelError, NotSupported
from outpace.inject.modules import FusedLayer
from outpace.inject.policies import by_class
from outpace.loading.build import Loaded, load
from outpace.loading.dtypes import short
from outpace.loading.fill import to_dtype
from outpace.loading.inspect import check_model, describe, encoder_decoder
from outpace.loading.memory import free_bytes
from outpace.log import chosen
from outpace.verify.compare import WITHOUT_REFERENCE, Observed, compare, rule
from outpace.verify.prompts import Inputs, make_prompts, new_tokens
from outpace.verify.report import Report


def verify(
    model: str | os.PathLike[str] | nn.Module | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompt_seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
    **options: Any,
) -> Report:
    """Compare a plain model with the injected one: hidden states, logits, greedy tokens.

    `model` is what `outpace.LLM` takes; a live module is copied and left as it is. `options` are those of
    `init_inference`: dtype, device, injection_policy, ... `progress` is called with each step as it begins.
    """
    asked = InferenceConfig.of(None, **options)
    if asked.asked_quant is not None or asked.kv_cache_dtype != "auto":
        raise NotSupported(
            "quant: verify compares only models that are not quantized; measure quantized ones with outpace eval"
        )
    progress("loading the model")
    loaded = _live(model, asked) if isinstance(model, nn.Module) else _load(model, asked)
    info = describe(loaded.model)
    if info.kind == "encoder-decoder":
        raise encoder_decoder(loaded.name)
    prompts = make_prompts(loaded.model, info, tokenizer or loaded.tokenizer, prompt_seed)
    new = new_tokens(info)

    def observe(run: str, model: nn.Module, new: int) -> list[Observed]:
        found = []
        for number, inputs in enumerate(prompts.values(), 1):
            progress(f"{run}, prompts {number} of {len(prompts)}")
            found.append(_observed(model, inputs, new))
        return found

    longest = max(inputs["input_ids"].shape[1] for inputs in prompts.values())
    config = _engine_config(asked, loaded, longest + new)
    _refuse_early(loaded.model, config)
    new = new if info.can_generate else 0
    plain = observe("plain", loaded.model, new)
    _check_plain(plain, loaded)
    exact = _float32_copy(loaded)
    reference = None if exact is None else observe("float32 copy", exact, 0)
    del exact  # free its memory
    progress("injecting fused layers")
    engine = InferenceEngine(loaded.model, config)  # from here on the model is no longer plain
    fused = observe("injected", engine, new)
    layers = [path for path, module in engine.module.named_modules() if isinstance(module, FusedLayer)]
    return Report(
        model=loaded.name,
        dtype=short(loaded.dtype),
        device=str(engine.device),
        fused_layers=len(layers),
        rule=rule(loaded.dtype, reference=reference is not None),
        tokens_count=loaded.dtype not in WITHOUT_REFERENCE,
        prompts=compare(prompts, plain, reference, fused, layers, loaded.dtype),
    )


def _load(model: str | os.PathLike[str] | None, config: InferenceConfig) -> Loaded:
    if not isinstance(model, str | os.PathLike | None):
        raise ModelError(f"model: expected a name, a path or a Hugging Face model, got {type(model).__name__}")
    return load(None if model is None else os.fspath(model), dtype=config.dtype, device=config.torch_device)


def _live(model: nn.Module, config: InferenceConfig) -> Loaded:
    """A copy of the caller's module, which injection may change."""
    if isinstance(model, InferenceEngine):
        raise InputError("model: got an engine, which has changed its model; load the model again")
    if not isinstance(check_model(model), PreTrainedModel):
        raise ModelError(f"model: expected a Hugging Face model, got {type(model).__name__}")
    ours = copy.deepcopy(model).eval()
    dtype = config.dtype or next(tensor.dtype for tensor in ours.parameters() if tensor.is_floating_point())
    to_dtype(ours, dtype)
    return Loaded(ours.to(config.torch_device), None, type(model).__name__, None, dtype, "")


def _engine_config(asked: InferenceConfig, loaded: Loaded, longest: int) -> InferenceConfig:
    given = {**asked.given(), "dtype": loaded.dtype, "max_out_tokens": longest}
    if asked.injection_policy is None:
        given["replace_with_kernel_inject"] = True
    return InferenceConfig(**given)


def _refuse_early(model: nn.Module, config: InferenceConfig) -> None:
    """Fail here for a model that cannot be injected, before the plain model runs for minutes."""
    kinds = {type(module) for module in model.modules()}
    names = {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    if config.injection_policy is None and not names & by_class().keys():
        InferenceEngine(model, config)  # without a policy, layers stay as they are


def _check_plain(plain: Sequence[Observed], loaded: Loaded) -> None:
    """Raise if the plain model gives NaN or only zeros, so that there is nothing to compare with."""
    places = [place for observed in plain for place in observed.places]
    if any(bool(place.isnan().any()) for place in places):
        raise ModelError(
            f"verify: plain {loaded.name} gives NaN in {short(loaded.dtype)}, so there is nothing to compare with; "
            "use another dtype, or load its weights again"
        )
    if not any(bool(place.any()) for place in places):
        raise ModelError(f"verify: plain {loaded.name} gives only zeros; its weights are zero or were not loaded")


@torch.no_grad()
def _observed(model: Any, inputs: Inputs, new: int) -> Observed:
    """Run a model and generate `new` greedy tokens: over pages in an engine, in Hugging Face's loop otherwise."""
    output = model(**inputs, output_hidden_states=True)
    if output.get("hidden_states") is None:
        raise ModelError("verify: the model gives no hidden states with output_hidden_states=True")
    real = inputs["attention_mask"].bool()

    def rows(values: Tensor) -> Tensor:
        return (values[real] if values.shape[:2] == real.shape else values).cpu()

    logits, tokens = output.get("logits"), None
    if new:
        own = model.generation_config
        end = own.eos_token_id[0] if isinstance(own.eos_token_id, list) else own.eos_token_id
        pad = end if own.pad_token_id is None else own.pad_token_id  # Hugging Face's choice, without its warning
        options = {} if pad is None else {"pad_token_id": pad}
        tokens = model.generate(**inputs, max_new_tokens=new, do_sample=False, **options).cpu()
    return Observed(list(map(rows, output.hidden_states)), None if logits is None else rows(logits), tokens)


def _float32_copy(loaded: Loaded) -> nn.Module | None:
    """A copy of a 16-bit model; None: not needed, or no memory for it."""
    if loaded.dtype not in WITHOUT_REFERENCE:
        return None
    if not _has_room(loaded.model):
        chosen("reference", "none", "a float32 copy of the model does not fit in the free memory")
        return None
    exact = copy.deepcopy(loaded.model)
    to_dtype(exact, torch.float32)
    return exact


def _has_room(model: nn.Module) -> bool:
    """Whether a float32 copy fits beside the model, with a tenth to spare."""
    parameters = list(model.parameters())
    free = free_bytes(parameters[0].device)
    return free is None or free > 4.4 * sum(parameter.numel() for parameter in parameters)
