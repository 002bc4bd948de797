"""Weights quantized while the model runs on a calibration text, one linear after the other.

The model has no weights but those of embeddings, norms and biases. A linear reads its weight when it is called, with
the inputs that it gets from the linears before it, which are quantized already. It quantizes the weight, hands it over,
and goes on with what the quantized weight computes. So one weight is in memory at a time, beside the activations of all
calibration tokens.
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
from outpace.kernels.quantize import quantize_rows_ref
from outpace.loading.problems import line
from outpace.loading.read_source import read
from outpace.loading.skeleton import with_buffers
from outpace.loading.weights import Source
from outpace.log import chosen
from outpace.quant.gptq import Inputs, gptq
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.scheme import Scheme
from outpace.quant.smooth import Folds, Maxima, folds

Method = Literal["rtn", "gptq"]
TOLERANCE = 1e-3
"""Of a hidden state, as a share of the largest: what folding may change by rounding."""
CHECKED = 32  # tokens that are run again to see that folding changes nothing
Give = Callable[[str, Tensor, Mapping[str, Tensor]], None]
"""Gets the path of a linear, its weight before it was quantized, and what it became."""


@dataclass(frozen=True)
class Calibration:
    """How weights are calibrated."""

    tokens: Tensor
    """[windows, tokens]."""
    method: Method = "rtn"
    smooth: float | None = None
    """SmoothQuant's alpha: how much of the outliers weights take; None: none."""


def calibrate(
    model: PreTrainedModel,
    sources: Mapping[str, Source],
    schemes: Mapping[str, Scheme],
    asked: Calibration,
    device: torch.device,
    give: Give,
) -> dict[str, Tensor]:
    """Quantize the linears of a skeleton that have schemes, by path; returns what else has changed, by name.

    sources: of every tensor of the model.
    """
    runs = _Runs(model, sources, device)
    changed: dict[str, Tensor] = {}
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
    else:
        runs.run(asked.tokens, _Quantizing(schemes, asked.method, give, Folds()))
    return changed


class _Linears:
    """What a linear does when it is called."""

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        """The output of the linear of a path. weight: as it is stored, in float32."""
        raise NotImplementedError


@dataclass
class _Plain(_Linears):
    """Computes as the model does, with what is folded."""

    made: Folds

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return F.linear(x, self.made.weight(path, weight), self.made.bias(path, bias))


@dataclass
class _Watching(_Linears):
    """Computes as the model does, and remembers the largest values."""

    maxima: dict[str, Maxima] = field(default_factory=dict)

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        inputs = x.reshape(-1, x.shape[-1]).abs().amax(dim=0)
        if path in self.maxima:
            inputs = torch.maximum(inputs, self.maxima[path].inputs)
        self.maxima[path] = Maxima(inputs, weight.abs().amax(dim=0), len(weight))
        return F.linear(x, weight, bias)


@dataclass
class _Quantizing(_Linears):
    """Quantizes each weight at its first call, and computes with the quantized one."""

    schemes: Mapping[str, Scheme]
    method: Method
    give: Give
    made: Folds
    done: set[str] = field(default_factory=set)
    _last: tuple[Tensor, Tensor, Inputs] | None = None
    """Inputs, as they came and as they are multiplied: linears that come one after the other may share them."""

    def call(self, path: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        weight, bias = self.made.weight(path, weight), self.made.bias(path, bias)
        scheme = self.schemes.get(path)
        if scheme is None:
            return F.linear(x, weight, bias)
        if path in self.done:
            raise NotSupported(f"method: {path} is called several times in one pass; quantize this model without it")
        self.done.add(path)
        rows = _restored(x, scheme)
        if self.method == "gptq":
            if self._last is None or self._last[0] is not x or not torch.equal(self._last[1], rows):
                self._last = (x, rows, Inputs(rows))
            tensors = gptq(weight, self._last[2], scheme)
        else:
            tensors = quantized(weight, scheme)
        self.give(path, weight, tensors)
        shape = (weight.shape[0], weight.shape[1])
        return F.linear(rows, as_packed(tensors, scheme, shape).dequantized(torch.float32), bias)


def _restored(x: Tensor, scheme: Scheme) -> Tensor:
    """Rows as they are multiplied."""
    if scheme.activations is None:
        return x
    values, scales = quantize_rows_ref(x.reshape(-1, x.shape[-1]), scheme.activations)
    return (values.float() * scales).view(x.shape)


class _Runs:
    """A skeleton that runs without the weights of its linears in memory."""

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
        """The last hidden states."""
        self._linears = linears
        try:
            output = self._base(input_ids=tokens.to(self._device), use_cache=False)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            name = type(self._model).__name__
            raise ModelError(f"model: {name} cannot be run on a calibration text ({line(error)})") from error
        found: Tensor = output.last_hidden_state
        return found

    def fold(self, maxima: Mapping[str, Maxima], alpha: float) -> Folds:
        """Choose what is folded, and change the norms."""
        layers = dict.fromkeys(_layer(path) for path in maxima)
        whole: Any = self._model.config
        config = whole.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        made = folds(layers, self._modules.__contains__, maxima, head_dim, alpha)
        if not made:
            raise NotSupported(
                f"smooth: {type(self._model).__name__} has no norm before quantized linears that is known by its name "
                "(input_layernorm, post_attention_layernorm); leave it out"
            )
        for path, factor in made.norms.items():
            for _, parameter in self.parameters(path):
                parameter.data = parameter.data / factor
        chosen("smooth", f"{len(made.norms)} norms, {len(made.rows)} linears", "outliers are folded into them")
        return made

    def parameters(self, path: str) -> list[tuple[str, nn.Parameter]]:
        """Those of one module, by name."""
        return list(self._modules[path].named_parameters(prefix=path, recurse=False))

    def bias(self, path: str) -> Tensor | None:
        """That of a linear."""
        module = self._modules[path]
        assert isinstance(module, nn.Linear)
        return module.bias


def _layer(path: str) -> str:
    """The layer of a linear: all up to the last number in its path."""
    parts = path.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdecimal()), default=-1)
    return ".".join(parts[: last + 1])


def _check_folds(before: Tensor, after: Tensor, name: str) -> None:
    """Refuse a model that is another one after folding."""
    if float((before - after).abs().max()) > TOLERANCE * float(before.abs().max()):
        raise NotSupported(
            f"smooth: {name} computes something else between norms and linears than is known by their names, so "
            "factors cannot be folded; leave it out"
        )
