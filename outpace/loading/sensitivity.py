"""Measures how much quantized weights increase a model's loss, and estimates it for each weight alone.

The estimate is of second order. If a linear's output at a token changes by d, the loss grows by about (g d)^2 / 2,
where g is the gradient of the loss at that output for a target token drawn from the model's own distribution: then the
mean of g g^T is the Fisher matrix, which approximates the Hessian, and first-order terms vanish. So one forward and
backward pass over a few hundred tokens, plus one product for each weight and scheme, ranks all weights, instead of a
pass for each weight. Stacks of experts are not linears: the KL divergence is measured for each of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outpace.errors import ModelError
from outpace.inject.recipe import Recipe
from outpace.kernels.quantize import quantize_rows_torch
from outpace.loading.windows import TextTokens, Window
from outpace.quant.rounding import restored
from outpace.quant.rules import TOGETHER, Role
from outpace.quant.scheme import Scheme

PASS_TOKENS = 2048
"""Maximum tokens of a pass."""
Advance = Callable[[], None]
"""Called after each pass."""


@dataclass(frozen=True)
class Weight:
    """Tensors that get the same scheme: those of one fused weight, or a single one."""

    role: Role
    names: tuple[str, ...]
    shape: tuple[int, ...]
    """[N, K] of all tensors together; [E, N, K] for experts."""
    transposed: bool
    """The model stores them as [in, out]."""
    tied: bool
    """The unquantized tensor is needed anyway: a head that is tied to the embedding."""


Schemes = Mapping[Weight, Scheme]


def weights(made: Mapping[tuple[str, ...], tuple[Role, Recipe]]) -> list[Weight]:
    """Group tensors that get the same scheme. Linears that fused layers join are always grouped, so that a plan fits
    models with and without fused layers."""
    found: dict[tuple[str, ...], list[tuple[tuple[str, ...], Role, Recipe]]] = {}
    for names, (role, recipe) in made.items():
        found.setdefault(_family(names), []).append((names, role, recipe))
    return [_joined(each) for each in found.values()]


def _family(names: tuple[str, ...]) -> tuple[str, ...]:
    owner, _, last = names[0].removesuffix(".weight").rpartition(".")
    together = next((each for each in TOGETHER if last in each), None)
    return names if together is None or len(names) > 1 else (owner, *together)


def _joined(each: list[tuple[tuple[str, ...], Role, Recipe]]) -> Weight:
    names, role, recipe = each[0]
    rows = sum(other.shape[-2] for _, _, other in each)
    tied = role == "head" and recipe.parts[0].name not in names
    every = tuple(name for names, _, _ in each for name in names)
    return Weight(role, every, (*recipe.shape[:-2], rows, recipe.shape[-1]), recipe.parts[0].transposed, tied)


@dataclass(frozen=True)
class _Place:
    """A tensor of a model: its module and attribute."""

    module: nn.Module
    attribute: str
    transposed: bool

    @classmethod
    def of(cls, model: nn.Module, weight: Weight) -> "list[_Place]":
        split = [name.rpartition(".") for name in weight.names]
        return [cls(model.get_submodule(path), name, weight.transposed) for path, _, name in split]

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear | Conv1D)

    @property
    def tensor(self) -> Tensor:
        tensor = self.module._parameters[self.attribute]
        assert tensor is not None, "weights have values"
        return tensor.data.transpose(-1, -2) if self.transposed else tensor.data

    def rounded(self, scheme: Scheme, dtype: torch.dtype) -> Tensor:
        """The tensor after quantization and dequantization, in the model's layout."""
        made = restored(self.tensor, scheme, dtype)
        return made.transpose(-1, -2) if self.transposed else made


@contextmanager
def rounded(model: nn.Module, schemes: Schemes) -> Iterator[None]:
    """Run the model as if these weights were quantized: each is rounded only while its module runs."""
    with ExitStack() as stack:
        for weight, scheme in schemes.items():
            for place in _Place.of(model, weight):
                _round_in(place, scheme, stack)
        yield


def _round_in(place: _Place, scheme: Scheme, stack: ExitStack) -> None:
    own = place.module._parameters[place.attribute]
    assert own is not None, "weights have values"
    kind = scheme.activations if place.is_linear else None

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        module._parameters[place.attribute] = nn.Parameter(place.rounded(scheme, own.dtype), requires_grad=False)
        return args if kind is None else (rounded_rows(args[0], kind), *args[1:])

    def after(module: nn.Module, *rest: Any) -> None:
        module._parameters[place.attribute] = own

    stack.callback(after, place.module)  # also after an error
    stack.enter_context(_removed(place.module.register_forward_pre_hook(before)))
    stack.enter_context(_removed(place.module.register_forward_hook(after)))


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def rounded_rows(x: Tensor, kind: str) -> Tensor:
    """Activations after quantization and dequantization."""
    values, scales = quantize_rows_torch(x.reshape(-1, x.shape[-1]), kind)
    return (values.float() * scales).to(x.dtype).view(x.shape)


def loss(
    model: nn.Module, tokens: TextTokens, windows: Sequence[Window], schemes: Schemes, advance: Advance = lambda: None
) -> float:
    """The mean loss per token, in nats, with weights quantized by these schemes."""
    total, count = 0.0, 0
    for batch in _batches(tokens, windows):
        rows = [tokens.of(window) for window in batch]
        with rounded(model, schemes):
            logits = _logits(model, rows)
        for window, ids, found in zip(batch, rows, logits, strict=True):
            targets = torch.tensor(ids[window.first :], device=logits.device)
            for part, wanted in zip(found[window.first - 1 : -1].split(256), targets.split(256), strict=True):
                total += float(F.cross_entropy(part.float(), wanted, reduction="sum"))
            count += len(targets)
            advance()
    if not total < float("inf"):
        raise ModelError(
            "quant.auto: the model gives NaN or infinite losses on the calibration text; use another dtype, or check "
            "its weights"
        )
    return total / count


def _batches(tokens: TextTokens, windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Batches of windows with equal lengths, so that weights are rounded once for each batch."""
    batch: list[Window] = []
    for window in windows:
        length = len(tokens.of(window))
        if batch and (len(tokens.of(batch[0])) != length or (len(batch) + 1) * length > PASS_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


@torch.no_grad()
def _logits(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    device = next(model.parameters()).device
    found: Tensor = model(input_ids=torch.tensor(rows, device=device), use_cache=False).logits
    return found


Estimates = dict[Weight, dict[Scheme, float]]


def estimates(
    model: Any, asked: Mapping[Weight, Sequence[Scheme]], windows: Sequence[Sequence[int]], advance: Advance
) -> Estimates:
    """Estimated increase of the loss per token, in nats, for each scheme of each weight that runs.

    windows: all of the same length. On a CPU they run in one batch, because rounding takes longer than a pass.
    """
    found: Estimates = {}
    places = {weight: _Place.of(model, weight) for weight in asked}
    linear = {weight: each for weight, each in places.items() if all(place.is_linear for place in each)}
    tokens = sum(map(len, windows))
    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        embedding = model.get_input_embeddings()
        stack.enter_context(_removed(embedding.register_forward_hook(lambda _, args, out: out.requires_grad_())))
        for weight, each in linear.items():
            for place in each:
                listener = _Listener(place, asked[weight], found.setdefault(weight, {}), 0.5 / tokens)
                stack.enter_context(_removed(place.module.register_forward_hook(listener)))
        on_cpu = next(model.parameters()).device.type == "cpu"
        for number, rows in enumerate([windows] if on_cpu else [[ids] for ids in windows]):
            _backward(model, rows, seed=number)
            advance()
    others = {weight: schemes for weight, schemes in asked.items() if weight not in linear}
    _measure_alone(model, others, windows, found, advance)
    return {weight: schemes for weight, schemes in found.items() if schemes}


class _Listener:
    """A hook that records a linear's inputs and output gradients, and sums the estimate of each scheme."""

    def __init__(self, place: _Place, schemes: Sequence[Scheme], sums: dict[Scheme, float], factor: float) -> None:
        self._place, self._schemes, self._sums, self._factor = place, schemes, sums, factor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args and output.requires_grad:
            x = args[0].detach()
            output.register_hook(lambda gradient: self._add(x.reshape(-1, x.shape[-1]), gradient))

    @torch.no_grad()
    def _add(self, x: Tensor, gradient: Tensor) -> None:
        weight = self._place.tensor
        gradient = gradient.reshape(-1, gradient.shape[-1]).float()
        for scheme in self._schemes:
            change = (restored(weight, scheme, torch.float32) - weight).to(x.dtype)
            if scheme.activations is None:
                moved = x @ change.t()
            else:
                rows = rounded_rows(x, scheme.activations)
                moved = rows @ change.t() + (rows - x) @ weight.t()
            added = self._factor * float((gradient * moved).sum(dim=1).square().sum())
            self._sums[scheme] = self._sums.get(scheme, 0.0) + added


def _backward(model: nn.Module, rows: Sequence[Sequence[int]], seed: int) -> None:
    """One forward and backward pass with target tokens drawn from the model's own distributions."""
    device = next(model.parameters()).device
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=torch.tensor(rows, device=device), use_cache=False).logits.flatten(0, 1).float()
        drawn = torch.Generator(device).manual_seed(seed)
        labels = torch.multinomial(logits.detach().softmax(dim=1), 1, generator=drawn)[:, 0]
        F.cross_entropy(logits, labels, reduction="sum").backward()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of parameters: only those of activations are needed, and take little memory."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def _measure_alone(
    model: nn.Module,
    asked: Mapping[Weight, Sequence[Scheme]],
    windows: Sequence[Sequence[int]],
    found: Estimates,
    advance: Advance,
) -> None:
    """Add the mean KL divergence from the original model with each weight quantized alone."""
    tokens = sum(map(len, windows))
    for ids in windows if asked else ():
        plain = _logits(model, [ids])[0].log_softmax(dim=1, dtype=torch.float32)
        for weight, schemes in asked.items():
            sums = found.setdefault(weight, {})
            for scheme in schemes:
                with rounded(model, {weight: scheme}):
                    other = _logits(model, [ids])[0].log_softmax(dim=1, dtype=torch.float32)
                added = float((plain.exp() * (plain - other)).sum().clamp(min=0)) / tokens
                sums[scheme] = sums.get(scheme, 0.0) + added
            advance()
