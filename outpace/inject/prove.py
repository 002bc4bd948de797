"""Finds out what unknown experts compute: each guess is compared with the results of their own code."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from outpace.kernels.activation import ACTIVATIONS, bias_act_torch
from outpace.kernels.routing import Routing, route_torch

TOKENS = 24
MOST_CHOSEN = 16
LIMIT = 1e-5  # largest relative error, in float32
ROUGH = 3e-2  # in 16 bits
LARGEST = 1 << 30  # bytes of random weights for the trial of a mixture on the meta device


@dataclass(frozen=True)
class ExpertForm:
    """The kind of MLP of an expert, with names of its linears as in `MoERoles`."""

    up: str | tuple[str, str]
    down: str
    gated: bool
    act: str


def linears(expert: nn.Module) -> dict[str, nn.Linear] | None:
    """The two or three linears of an MLP by name; None: it has other weights."""
    found = {name: module for name, module in expert.named_modules() if type(module) is nn.Linear}
    held = sum(len(list(linear.parameters())) for linear in found.values())
    return found if len(found) in (2, 3) and held == len(list(expert.parameters())) else None


@torch.no_grad()
def expert_form(expert: nn.Module, width: int, likely: ExpertForm | None = None) -> ExpertForm | None:
    """The kind of MLP of an expert; None: unknown. likely: tried first."""
    names = linears(expert)
    if names is None:
        return None
    tried = real(expert).float().eval()
    x = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0)).to(next(tried.parameters()).device)
    errors: dict[ExpertForm, float] = {}
    for up, down, gated in _shapes(names, width):
        if likely is not None and (up, down, gated) != (likely.up, likely.down, likely.gated):
            continue
        first = tried.get_submodule(up if isinstance(up, str) else up[0])
        scaled = x * (3 / float(first(x).std().clamp(min=1e-6)))  # large enough to tell activations apart
        want = _called(tried, scaled)
        if want is None:
            return None
        for act in dict.fromkeys(ACTIVATIONS.values()) if likely is None else (likely.act,):
            form = ExpertForm(up, down, gated, act)
            errors[form] = _error(_mlp(tried, form, scaled), want)
    best = min(errors, key=lambda form: errors[form], default=None)
    if best is not None and errors[best] <= LIMIT:
        return best
    return None if likely is None else expert_form(expert, width)


def _shapes(names: dict[str, nn.Linear], width: int) -> Iterator[tuple[str | tuple[str, str], str, bool]]:
    for *ups, down in permutations(names):
        inner, sizes = names[down].in_features, [(names[up].in_features, names[up].out_features) for up in ups]
        if names[down].out_features != width:
            continue
        if sizes == [(width, inner)]:
            yield ups[0], down, False
        elif sizes == [(width, 2 * inner)]:
            yield ups[0], down, True
        elif sizes == [(width, inner)] * 2:
            yield (ups[0], ups[1]), down, True


def _mlp(expert: nn.Module, form: ExpertForm, x: Tensor) -> Tensor:
    names = (form.up,) if isinstance(form.up, str) else form.up
    inner = torch.cat([expert.get_submodule(name)(x) for name in names], dim=-1)
    gate, up = inner.chunk(2, dim=-1) if form.gated else (inner, None)
    activated = bias_act_torch(gate, None, form.act)
    result: Tensor = expert.get_submodule(form.down)(activated if up is None else activated * up)
    return result


def _called(expert: nn.Module, x: Tensor) -> Tensor | None:
    result = _first(expert(x))
    return result if isinstance(result, Tensor) and result.shape == x.shape else None


@dataclass(frozen=True)
class Proven:
    """How a mixture routes, and what it returns."""

    routing: Routing
    logits_dim: int = 0
    """Of the router's logits, which it returns beside the result; 0: it returns the result alone."""


@torch.no_grad()
def routing_of(block: nn.Module, gate: nn.Linear, experts: Sequence[nn.Module]) -> Proven | str:
    """How a mixture routes; or why that is unknown."""
    if len(inspect.signature(block.forward).parameters) != 1:
        return "its forward takes more than hidden states"
    if any(parameter.is_meta for parameter in block.parameters()):
        if 4 * sum(parameter.numel() for parameter in block.parameters()) > LARGEST:
            return "its weights are not loaded yet, and it is too large to be tried with random ones"
        places = [_path(block, module) for module in (gate, *experts)]
        block = real(block)
        gate, *experts = [block.get_submodule(path) for path in places]  # type: ignore[assignment]
    weight = gate.weight
    x = torch.randn(TOKENS, gate.in_features, generator=torch.Generator().manual_seed(0)).to(weight.device)
    x = (x * (2 / float(gate(x.to(weight.dtype)).float().std().clamp(min=1e-6)))).to(weight.dtype)
    with _quiet(block):
        try:
            result: Any = block(x[None])
        except Exception as error:  # unknown code may raise anything
            return f"its forward does not take hidden states [batch, tokens, width] ({type(error).__name__}: {error})"
        logits: Tensor = gate(x)
        answers = torch.stack([_first(expert(x)) for expert in experts])  # [E, T, H]
    returned = _returned(result, x, logits)
    if returned is None:
        return "it returns neither hidden states alone nor hidden states and the logits of its router"
    want, logits_dim = returned
    found = min(_candidates(len(experts)), key=lambda routing: _error(_mixed(logits, answers, routing), want))
    limit = LIMIT if weight.dtype == torch.float32 else ROUGH
    if not _error(_mixed(logits, answers, found), want) <= limit:
        return "its result is not a known weighted sum of its best experts"
    return Proven(found, logits_dim)


def _candidates(experts: int) -> Iterator[Routing]:
    for top_k in range(1, min(experts, MOST_CHOSEN) + 1):
        for renormalise in (False, True):
            yield Routing(top_k=top_k, renormalise=renormalise)
            yield Routing(top_k=top_k, score="sigmoid", renormalise=renormalise)


def _mixed(logits: Tensor, answers: Tensor, routing: Routing) -> Tensor:
    weights, chosen = route_torch(logits, routing)
    tokens = torch.arange(len(chosen), device=chosen.device)[:, None]
    return (answers[chosen.long(), tokens].float() * weights[:, :, None]).sum(1)


def _returned(result: Any, x: Tensor, logits: Tensor) -> tuple[Tensor, int] | None:
    """The hidden states of a result, and the number of dimensions of its logits; 0: it has none."""
    if isinstance(result, Tensor):
        return (result[0], 0) if result.shape == (1, *x.shape) else None
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(part, Tensor) for part in result):
        return None
    hidden, other = result
    fits = hidden.shape == (1, *x.shape) and other.numel() == logits.numel() and other.dim() in (2, 3)
    same = fits and _error(other.reshape(logits.shape), logits) <= ROUGH
    return (hidden[0], other.dim()) if same else None


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _error(found: Tensor, want: Tensor) -> float:
    """Relative to the largest value; infinite for NaN."""
    error = float((found.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-12))
    return error if error == error else float("inf")


@contextmanager
def _quiet(block: nn.Module) -> Iterator[None]:
    """During a trial: no dropout, and no change of random generators."""
    training = [module for module in block.modules() if module.training]
    block.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module in training:
            module.training = True


def real(module: nn.Module) -> nn.Module:
    """A copy with random weights instead of those on the meta device."""
    made = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    for each in made.modules():
        for name, parameter in each.named_parameters(recurse=False):
            if parameter.is_meta:
                values = torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1]) ** 0.5
                each._parameters[name] = nn.Parameter(values, requires_grad=False)
    return made


def _path(block: nn.Module, module: nn.Module) -> str:
    return next(path for path, each in block.named_modules() if each is module)
