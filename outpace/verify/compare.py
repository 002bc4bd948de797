"""How far the results of fused layers are from what they should be, and how far they may be."""

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
"""The 16-bit dtypes, and their relative error against plain Hugging Face if there is no memory for a float32 copy."""


@dataclass(frozen=True)
class Observed:
    """What a model computed for one set of prompts: vectors of the real tokens [T, ...]."""

    states: list[Tensor]
    logits: Tensor | None
    tokens: Tensor | None = None
    """[B, L] prompts and greedy tokens."""

    @property
    def places(self) -> list[Tensor]:
        """The hidden states, and the logits if there are any."""
        return self.states if self.logits is None else [*self.states, self.logits]


def compare(
    prompts: Mapping[str, Inputs],
    plain: Sequence[Observed],
    reference: Sequence[Observed] | None,
    fused: Sequence[Observed],
    layers: Sequence[str],
    dtype: torch.dtype,
) -> tuple[PromptReport, ...]:
    """A report for each set of prompts; `reference` is what a float32 copy computed for them."""
    if len(plain[0].places) != len(fused[0].places):
        raise ModelError(f"verify: {len(plain[0].places)} outputs of the plain model, {len(fused[0].places)} injected")
    names, count = _names(plain[0], layers), len(plain[0].states)
    judged = _against_plain(plain, fused, dtype) if reference is None else _against_exact(reference, plain, fused)
    reports = []
    for (name, inputs), errors, want, got in zip(prompts.items(), judged, plain, fused, strict=True):
        places = tuple(Compared(place, *error) for place, error in zip(names, errors, strict=True))
        length = inputs["input_ids"].shape[1]
        reports.append(
            PromptReport(
                name=name,
                lengths=tuple(inputs["attention_mask"].sum(1).tolist()),
                layers=places[:count],
                logits=None if want.logits is None else places[count],
                new_tokens=0 if want.tokens is None else want.tokens.shape[1] - length,
                first_difference=_first_difference(want.tokens, got.tokens, length),
            )
        )
    return tuple(reports)


def rule(dtype: torch.dtype, *, reference: bool) -> str:
    """The criterion of `compare`, in words."""
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


Judged = list[list[tuple[float, float]]]
"""For each set of prompts and each place: the error, and the allowed error."""


def _against_plain(plain: Sequence[Observed], fused: Sequence[Observed], dtype: torch.dtype) -> Judged:
    limit = WITHOUT_REFERENCE.get(dtype)
    if limit is None:
        return [[(_finite(rows.max()), TOLERANCE) for rows in places] for places in _errors(plain, fused)]
    return [[(_mean(rows), limit) for rows in places] for places in _errors(plain, fused)]


def _against_exact(exact: Sequence[Observed], plain: Sequence[Observed], fused: Sequence[Observed]) -> Judged:
    """A set may have the largest error of plain Hugging Face in any set, times the headroom, and more with few tokens.

    If a large value rounds well in one run and badly in the other, the errors of a single token differ by a factor of 9
    (SmolLM2, float16), and those of 300 tokens by 1.1.
    """
    largest = [max(map(_mean, sets)) for sets in zip(*_errors(exact, plain), strict=True)]
    return [
        [
            (_mean(rows), HEADROOM * (1 + 1 / math.sqrt(rows.numel())) * most)
            for rows, most in zip(places, largest, strict=True)
        ]
        for places in _errors(exact, fused)
    ]


def _errors(expected: Sequence[Observed], found: Sequence[Observed]) -> list[list[Tensor]]:
    """For each set of prompts and each place, the errors of the tokens."""
    return [list(map(token_errors, want.places, got.places)) for want, got in zip(expected, found, strict=True)]


def _mean(errors: Tensor) -> float:
    """Root of the mean square."""
    return _finite(errors.square().mean().sqrt())


def _finite(value: Tensor) -> float:
    """NaN as infinity, which never passes."""
    return value.item() if math.isfinite(value.item()) else math.inf


def _names(observed: Observed, layers: Sequence[str]) -> list[str]:
    count = len(observed.states)
    named = ["embedding", *layers]
    states = named if len(named) == count else [f"hidden state {place}" for place in range(count)]
    return states if observed.logits is None else [*states, "logits"]


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
