"""How far what fused layers made is from what it should be, and how far it may be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.dtypes import short
from outpace.verify.prompts import Inputs
from outpace.verify.report import Compared, PromptReport

TOLERANCE = 1e-4
"""Relative error that float32 may have against plain Hugging Face, at the worst token."""
HEADROOM = 1.5
"""A 16-bit run may be this many times as far from a float32 copy as plain Hugging Face is in the same dtype."""
WITHOUT_REFERENCE: Mapping[torch.dtype, float] = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The dtypes of 16 bits, and the relative error against plain Hugging Face where a float32 copy has no room."""


@dataclass(frozen=True)
class Observed:
    """What a model made of one set of prompts: vectors of the real tokens [T, ...]."""

    states: list[Tensor]
    logits: Tensor | None
    tokens: Tensor | None = None
    """[B, L] prompts and greedy tokens."""

    @property
    def places(self) -> list[Tensor]:
        """The hidden states, and the logits where there are any."""
        return self.states if self.logits is None else [*self.states, self.logits]


def compare(
    prompts: Mapping[str, Inputs],
    plain: Sequence[Observed],
    reference: Sequence[Observed] | None,
    fused: Sequence[Observed],
    layers: Sequence[str],
    dtype: torch.dtype,
) -> tuple[PromptReport, ...]:
    """A report for each set of prompts; `reference` is what a float32 copy made of them."""
    names = _names(plain[0], layers)
    if len(plain[0].places) != len(fused[0].places):
        raise ModelError(f"verify: {len(plain[0].places)} outputs of the plain model, {len(fused[0].places)} injected")
    judged = _against_plain(plain, fused, dtype) if reference is None else _against_exact(reference, plain, fused)
    return tuple(
        _report(name, inputs, [Compared(*place) for place in zip(names, *places, strict=True)], want, got)
        for (name, inputs), places, want, got in zip(prompts.items(), judged, plain, fused, strict=True)
    )


def rule(dtype: torch.dtype, *, reference: bool) -> str:
    """What `compare` asks for, in words."""
    if reference:
        return (
            f"mean error against a float32 copy up to {HEADROOM} times (1 + 1 / root of the tokens) the largest of "
            f"plain Hugging Face in {short(dtype)}"
        )
    kind, limit = ("mean", WITHOUT_REFERENCE[dtype]) if dtype in WITHOUT_REFERENCE else ("worst", TOLERANCE)
    return f"{kind} relative error against plain Hugging Face up to {limit:g}"


def token_errors(expected: Tensor, found: Tensor) -> Tensor:
    """|found - expected| / |expected| of each token's vector."""
    want, got = expected.float(), found.float()
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)


Judged = list[tuple[list[float], list[float]]]
"""For each set of prompts the errors of its places, and what they may be."""


def _against_plain(plain: Sequence[Observed], fused: Sequence[Observed], dtype: torch.dtype) -> Judged:
    measure, limit = (_mean, WITHOUT_REFERENCE[dtype]) if dtype in WITHOUT_REFERENCE else (_worst, TOLERANCE)
    errors = [[measure(rows) for rows in _errors(*pair)] for pair in zip(plain, fused, strict=True)]
    return [(found, [limit] * len(found)) for found in errors]


def _against_exact(exact: Sequence[Observed], plain: Sequence[Observed], fused: Sequence[Observed]) -> Judged:
    """What a set may have: the largest error of plain Hugging Face in any set, times the headroom, times its luck.

    Where one large value rounds well in one run and badly in the other, the errors of a single token differ by a factor
    of 9 (SmolLM2, float16), and those of 300 tokens by 1.1.
    """
    theirs, ours = ([_errors(*pair) for pair in zip(exact, found, strict=True)] for found in (plain, fused))
    largest = [max(_mean(rows) for rows in place) for place in zip(*theirs, strict=True)]
    return [
        (
            [_mean(rows) for rows in errors],
            [HEADROOM * _luck(rows) * most for rows, most in zip(errors, largest, strict=True)],
        )
        for errors in ours
    ]


def _luck(errors: Tensor) -> float:
    """How much more a mean over few tokens may be off than one over many."""
    return 1 + 1 / math.sqrt(errors.numel())


def _errors(expected: Observed, found: Observed) -> list[Tensor]:
    return [token_errors(want, got) for want, got in zip(expected.places, found.places, strict=True)]


def _worst(errors: Tensor) -> float:
    return _or_infinite(errors.max().item())


def _mean(errors: Tensor) -> float:
    """Root of the mean square."""
    return _or_infinite(errors.square().mean().sqrt().item())


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _names(observed: Observed, layers: Sequence[str]) -> list[str]:
    count = len(observed.states)
    named = ["embedding", *layers]
    states = named if len(named) == count else [f"hidden state {place}" for place in range(count)]
    return states if observed.logits is None else [*states, "logits"]


def _report(name: str, inputs: Inputs, places: list[Compared], plain: Observed, fused: Observed) -> PromptReport:
    count, length = len(plain.states), inputs["input_ids"].shape[1]
    return PromptReport(
        name=name,
        lengths=tuple(inputs["attention_mask"].sum(1).tolist()),
        layers=tuple(places[:count]),
        logits=None if plain.logits is None else places[count],
        new_tokens=0 if plain.tokens is None else plain.tokens.shape[1] - length,
        first_difference=_first_difference(plain.tokens, fused.tokens, length),
    )


def _first_difference(want: Tensor | None, got: Tensor | None, start: int) -> tuple[int, int] | None:
    """Prompt and new token where two outputs first differ, or where one of them ends."""
    if want is None or got is None:
        return None
    length = min(want.shape[1], got.shape[1])
    differ = (want[:, :length] != got[:, :length]).nonzero().tolist()
    if differ:
        row, column = min(differ, key=lambda place: (place[1], place[0]))
        return row, column - start
    return None if want.shape == got.shape else (0, length - start)
