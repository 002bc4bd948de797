"""Quantizes weights while the model runs on a calibration text, one linear after the other.

Only embeddings, norms and biases are loaded. When a linear is called, its inputs come from linears that are already
quantized. It reads its weight, quantizes it, passes it on, and continues with the output of the quantized weight. So
memory holds one weight at a time, and the activations of all calibration tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import ModelError, NotSupported
from outpace.loading.problems import line
from outpace.loading.read_source import read
from outpace.loading.sensitivity import rounded_rows
from outpace.loading.skeleton import with_buffers
from outpace.loading.weights import Source
from outpace.log import chosen
from outpace.quant.gptq import Inputs, gptq
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.scheme import Scheme
from outpace.quant.smooth import Folds, Maxima, folds

Method = Literal["rtn", "gptq"]
TOLERANCE = 1e-3
"""Maximum change of hidden states by folding, relative to the largest value: only rounding errors."""
CHECKED = 32  # tokens that are run again to check that folding changes nothing
Give = Callable[[str, Tensor, Mapping[str, Tensor]], None]
"""Called with the path of a linear, its weight before quantization, and the quantized tensors."""


@dataclass(frozen=True)
class Calibration:
    """The options of a calibration."""

    tokens: Tensor
    """[windows, tokens]."""
    method: Method = "rtn"
    smooth: float | None = None
    """SmoothQuant's alpha; None: no smoothing."""


def calibrate(
    model: PreTrainedModel,
    sources: Mapping[str, Source],
    schemes: Mapping[str, Scheme],
    asked: Calibration,
    device: torch.device,
    give: Give,
) -> dict[str, Tensor]:
    """Quantize the linears of a skeleton; returns the other tensors that changed, by name.

    sources: the source of each tensor of the model. schemes: path of a linear -> its scheme.
    """
    runs = _Runs(model, sources, device)
    changed: dict[str, Tensor] = {}
    made = Folds()
    if asked.smooth is not None:
        watching = _Watching()
        before = runs.run(asked.tokens, watching)
        found = {path: maxima for path, maxima in watching.maxima.items() if path in schemes}
        made = runs.fold(found, asked.smooth)
        after = runs.run(asked.tokens[:1, :CHECKED], _Plain(made))
        _check_folds(before[:1, :CHECKED], after, type(model).__name__)
        changed = {name: value.data.cpu() for path in made.norms for name, value in runs.parameters(path)}
        biases = {path: made.bias(path, runs.bias(path)) for path in made.rows}
        changed.update({f"{path}.bias": bias.cpu() for path, bias in biases.items() if bias is not None})
    runs.run(asked.tokens, _Quantizing(schemes, asked.method, give, made))
    return changed


class _Linears:
    """Replaces the computation of linears."""

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """The output of the linear at `path`. weight: the stored weight, in float32."""
        raise NotImplementedError


@dataclass
class _Plain(_Linears):
    """Computes the model's output, with folded factors."""

    made: Folds

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return F.linear(x, self.made.weight(path, weight), self.made.bias(path, bias))


@dataclass
class _Watching(_Linears):
    """Computes the model's output, and records the largest inputs and weights."""

    maxima: dict[str, Maxima] = field(default_factory=dict)

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        inputs = x.reshape(-1, x.shape[-1]).abs().amax(dim=0)
        if path in self.maxima:
            inputs = torch.maximum(inputs, self.maxima[path].inputs)
        self.maxima[path] = Maxima(inputs, weight.abs().amax(dim=0), len(weight))
        return F.linear(x, weight, bias)


@dataclass
class _Quantizing(_Linears):
    """Quantizes each weight at its first call, and computes with the quantized weight."""

    schemes: Mapping[str, Scheme]
    method: Method
    give: Give
    made: Folds
    done: set[str] = field(default_factory=set)
    _last: tuple[Tensor, Tensor, Inputs] | None = None
    """The last inputs before and after quantization, with their statistics: consecutive linears often share them."""

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        weight, bias = self.made.weight(path, weight), self.made.bias(path, bias)
        scheme = self.schemes.get(path)
        if scheme is None:
            return F.linear(x, weight, bias)
        if path in self.done:
            raise NotSupported(
                f"method: {path} is called several times in one pass, so it cannot be calibrated; remove method and "
                "smooth"
            )
        self.done.add(path)
        rows = x if scheme.activations is None else rounded_rows(x, scheme.activations)
        if self.method == "gptq":
            if self._last is None or self._last[0] is not x or not torch.equal(self._last[1], rows):
                self._last = (x, rows, Inputs(rows))
            tensors = gptq(weight, self._last[2], scheme)
        else:
            tensors = quantized(weight, scheme)
        self.give(path, weight, tensors)
        shape = (weight.shape[0], weight.shape[1])
        return F.linear(rows, as_packed(tensors, scheme, shape).dequantized(torch.float32), bias)


class _Runs:
    """Runs a skeleton without the weights of its linears in memory."""

    def __init__(self, model: PreTrainedModel, sources: Mapping[str, Source], device: torch.device) -> None:
        self._model, self._sources, self._device = with_buffers(model).eval(), sources, device
        self._linears: _Linears = _Plain(Folds())
        self._base: Any = model.base_model
        root = next(path for path, module in model.named_modules() if module is self._base)
        parts = dict(self._base.named_modules(prefix=root))
        self._modules: dict[str, nn.Module] = parts
        for path, module in parts.items():
            self._prepare(path, module)

    def _prepare(self, path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            leaf = name.rpartition(".")[2]
            if isinstance(module, nn.Linear) and leaf == "weight":
                module.forward = partial(self._call, path, module)  # type: ignore[method-assign]
            elif parameter.is_meta:
                value = read(self._sources[name]).to(self._device, torch.float32)
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for leaf, buffer in module.named_buffers(recurse=False):
            module._buffers[leaf] = buffer.to(self._device)

    def _call(self, path: str, module: nn.Linear, x: Tensor) -> Tensor:
        weight = read(self._sources[f"{path}.weight"]).to(self._device, torch.float32)
        return self._linears.call(path, weight, module.bias, x)

    @torch.inference_mode()
    def run(self, tokens: Tensor, linears: _Linears) -> Tensor:
        """Run the model on tokens; returns the last hidden states."""
        self._linears = linears
        try:
            output = self._base(input_ids=tokens.to(self._device), use_cache=False)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            name = type(self._model).__name__
            raise ModelError(f"model: {name} cannot be run on a calibration text ({line(error)})") from error
        found: Tensor = output.last_hidden_state
        return found

    def fold(self, maxima: Mapping[str, Maxima], alpha: float) -> Folds:
        """Choose the factors to fold, and divide the norms by them."""
        layers = dict.fromkeys(_layer(path) for path in maxima)
        whole: Any = self._model.config
        config = whole.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        made = folds(layers, self._modules.__contains__, maxima, head_dim, alpha)
        if not made:
            raise NotSupported(
                f"smooth: {type(self._model).__name__} has no norm with a known name (input_layernorm, "
                "post_attention_layernorm) before quantized linears; remove it"
            )
        for path, factor in made.norms.items():
            for _, parameter in self.parameters(path):
                parameter.data = parameter.data / factor
        chosen("smooth", f"{len(made.norms)} norms, {len(made.rows)} linears", "outliers are folded into them")
        return made

    def parameters(self, path: str) -> list[tuple[str, nn.Parameter]]:
        return list(self._modules[path].named_parameters(prefix=path, recurse=False))

    def bias(self, path: str) -> Tensor | None:
        module = self._modules[path]
        assert isinstance(module, nn.Linear)
        return module.bias


def _layer(path: str) -> str:
    """The layer of a linear: its path up to the last number."""
    parts = path.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[: last + 1])


def _check_folds(before: Tensor, after: Tensor, name: str) -> None:
    """Refuse a model whose outputs change by folding."""
    if float((before - after).abs().max()) > TOLERANCE * float(before.abs().max()):
        raise NotSupported(
            f"smooth: {name} computes something between its norms and linears that their names do not show, so "
            "factors cannot be folded; remove it"
        )
