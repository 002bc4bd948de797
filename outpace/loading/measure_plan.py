"""Prepares the model and the texts on which a plan (`quant.auto`) is measured, and writes the plan."""

import copy
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from outpace.config.quantization import AutoQuantConfig, QuantizationConfig
from outpace.errors import ConfigError, InputError, ModelError
from outpace.loading.bars import passes
from outpace.loading.calibration import read_calibration
from outpace.loading.choose_plan import WINDOW, Chooser, Report, Sample
from outpace.loading.dtypes import short
from outpace.loading.fill import fill, settle
from outpace.loading.inspect import ModelInfo
from outpace.loading.memory import free_bytes
from outpace.loading.sensitivity import Weight
from outpace.loading.targets import Before
from outpace.loading.text import built_in_text
from outpace.loading.weights import Source
from outpace.loading.windows import TextTokens, read_tokens
from outpace.log import chosen, logger, size_text
from outpace.quant.picture import can_draw, draw
from outpace.quant.plan import QuantPlan

MIN_EVALUATION = 256
"""Minimum tokens that must be left after the calibration; with fewer, the built-in text is used for evaluation."""


def measured_plan(
    module: nn.Module,
    weights: Sequence[Weight],
    quant: QuantizationConfig,
    info: ModelInfo,
    sources: Mapping[str, Source] | None,
    dtype: torch.dtype,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase | None,
) -> QuantPlan:
    """Choose a plan for a model that is not injected yet.

    sources: fill a temporary copy of the model with these; None: the model has its own weights, which are converted and
    moved to the device.
    """
    assert quant.auto is not None, "a plan is measured only if quant.auto is set"
    if not info.can_generate or info.kind != "causal":
        raise ConfigError(
            f"quant.auto: {type(module).__name__} predicts no next token, so there is no perplexity to measure; "
            "give quant.scheme or quant.weight"
        )
    _check_out(quant.auto)
    calibration, evaluation = _samples(quant, info, tokenizer)
    before = Before.of(module, dtype)
    sizes = {name: value.numel() * before.dtypes[name].itemsize for name, value in module.named_parameters()}
    linears = sum(math.prod(weight.shape) * dtype.itemsize for weight in weights if not weight.tied)
    _check_room(module, sizes, sources is not None, dtype, device)
    with torch.inference_mode(False), _memory_errors(device), passes() as report:  # the estimates need gradients
        if sources is None:
            settle(module, before, device)
            model = module
        else:
            model = _filled(module, dtype, sources, device, report)
        model.eval()
        others = sum(sizes.values()) - linears
        plan = Chooser(model, weights, quant, dtype.itemsize, calibration, evaluation, others, report).choose()
    del model
    if sources is not None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    _report(plan, quant.auto)
    return plan


def _samples(
    quant: QuantizationConfig, info: ModelInfo, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Sample, Sample | None]:
    """(text for calibration, text for evaluation: the rest of that text or the built-in text, or None)."""
    name, tokens = read_calibration(quant.calibration, tokenizer)
    largest = max(tokens.ids)
    if info.vocab_size is not None and largest >= info.vocab_size:
        raise ConfigError(
            f"quant.calibration.text: token {largest} is not among the {info.vocab_size} tokens of the model; give a "
            "text for its own tokenizer"
        )
    count, window = quant.calibration.tokens, min(WINDOW, info.max_positions or WINDOW)
    first, rest = tokens.ids[:count], tokens.ids[count : 2 * count]
    try:
        calibration = Sample.of(name, TextTokens(first, tokens.prefix, None), window)
    except InputError as error:
        raise ConfigError(f"quant.calibration.{error}") from error
    if len(rest) < MIN_EVALUATION and tokenizer is not None and quant.calibration.text is not None:
        name, rest = "built-in text", read_tokens(tokenizer, built_in_text(), count).ids
    elif rest:
        name = f"the rest of {name}"
    if len(rest) < 2:
        chosen("evaluation", None, "no text is left after the calibration; give a longer one")
        return calibration, None
    return calibration, Sample.of(name, TextTokens(rest, tokens.prefix, None), window)


def _check_room(
    module: nn.Module, sizes: Mapping[str, int], copied: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a model that does not fit in memory in its dtype."""
    there = [] if copied else [name for name, value in module.named_parameters() if value.device == device]
    largest = max(value.numel() for value in module.parameters())
    needed = sum(size for name, size in sizes.items() if name not in there) + 8 * largest
    free = free_bytes(device)
    if free is not None and needed > free:
        raise _too_large(f"{size_text(sum(sizes.values()))} in {short(dtype)}", device)


def _too_large(what: str, device: torch.device) -> ModelError:
    return ModelError(
        f"quant.auto: the whole model ({what}) is on {device} while it is measured, but there is not enough memory; "
        "measure it on a machine with more (outpace quantize --auto, device='cpu'), and give the plan as quant.plan"
    )


@contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory errors into ours."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise _too_large("and the memory of a pass", device) from error
        raise


def _filled(
    module: nn.Module, dtype: torch.dtype, sources: Mapping[str, Source], device: torch.device, report: Report
) -> nn.Module:
    """A copy of a skeleton, filled with weights."""
    report("loading the model to measure", 0, 0)
    empty = {
        id(value): nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
        for value in module.parameters()
    }
    made = copy.deepcopy(module, dict(empty))
    fill(made, Before.of(made, dtype), sources, device)
    return made


def _check_out(auto: AutoQuantConfig) -> None:
    """Check quant.auto.out before minutes of measuring."""
    if auto.out is None:
        return
    path = Path(auto.out)
    if not path.parent.is_dir():
        raise ConfigError(f"quant.auto.out: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"quant.auto.out: {path} is a folder; give the name of a file")


def _report(plan: QuantPlan, auto: AutoQuantConfig) -> None:
    """Report the plan in the log, and in files if they are requested."""
    for weight in plan.weights:
        chosen(weight.title, weight.got, weight.why)
    for line in (plan.summary, *plan.measured):
        logger.info("quant.auto: %s", line)
    if auto.out is not None:
        write_plan(plan, Path(auto.out))


def write_plan(plan: QuantPlan, path: Path) -> list[Path]:
    """Write the plan as JSON, its table, and its picture if matplotlib is installed; returns the files."""
    plan.write(path)
    path.with_suffix(".md").write_text(plan.table, encoding="utf-8")
    written = [path, path.with_suffix(".md")]
    if can_draw():
        draw(plan, path.with_suffix(".png"))
        written.append(path.with_suffix(".png"))
    else:
        chosen("picture of the plan", None, "matplotlib is not installed; pip install 'outpace[bench]'")
    return written
