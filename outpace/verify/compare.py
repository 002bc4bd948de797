"""The errors of the results of fused layers, and the errors that are allowed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.dtypes import short
from outpace.verify.prompts import Inputs
from outpace.verify.report import Compared, PromptReport

TOLERANCE = 1e-4
"""Allowed relative error of the worst token in float32, against plain Hugging Face."""
HEADROOM = 1.5
"""Allowed error of a 16-bit run against a float32 copy, as a multiple of plain Hugging Face's error in that dtype."""
WITHOUT_REFERENCE: Mapping[torch.dtype, float] = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""16-bit dtypes -> allowed relative error against plain Hugging Face, if a float32 copy does not fit in memory."""


@dataclass(frozen=True)
class Observed:
    """What a model computed for one set of prompts: vectors of the tokens without padding [T, ...]."""

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
    """A report for each set of prompts; `reference`: the results of a float32 copy."""
    if len(plain[0].places) != len(fused[0].places):
        raise ModelError(f"verify: {len(plain[0].places)} outputs of the plain model, {len(fused[0].places)} injected")
    names, count = _names(plain[0], layers), len(plain[0].states)
    judged = _judge(plain, reference, fused, dtype)
    reports = []
    for (name, inputs), errors, want, got in zip(prompts.items(), judged, plain, fused, strict=True):
        places = tuple(Compared(place, *error) for place, error in zip(names, errors, strict=True))
        length = inputs["input_ids"].shape[1]
        new, ours = ([] if each.tokens is None else each.tokens[:, length:].tolist() for each in (want, got))
        reports.append(
            PromptReport(
                name=name,
                lengths=tuple(inputs["attention_mask"].sum(1).tolist()),
                layers=places[:count],
                logits=None if want.logits is None else places[count],
                new_tokens=len(new[0]) if new else 0,
                first_difference=first_difference(new, ours),
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


def first_difference(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Prompt and new token, both counted from 0, where outputs first differ or one of them ends."""
    differences = (
        (place, prompt)
        for prompt, outputs in enumerate(zip(wanted, found, strict=True))
        for place, (ours, theirs) in enumerate(zip_longest(*outputs))
        if ours != theirs
    )
    place, prompt = min(differences, default=(None, None))
    return None if place is None or prompt is None else (prompt, place)


def _judge(
    plain: Sequence[Observed], reference: Sequence[Observed] | None, fused: Sequence[Observed], dtype: torch.dtype
) -> list[list[tuple[float, float]]]:
    """For each set of prompts and each place: the error, and the allowed error.

    With a reference, the allowed error is the largest error of plain Hugging Face in any set, times the headroom, and
    larger for few tokens: if a large value rounds well in one run and badly in the other, the errors of a single token
    differ by a factor of 9 (SmolLM2, float16), and those of 300 tokens by 1.1.
    """
    if reference is None:
        error, allowed = (_mean, WITHOUT_REFERENCE[dtype]) if dtype in WITHOUT_REFERENCE else (_worst, TOLERANCE)
        return [[(error(rows), allowed) for rows in places] for places in _errors(plain, fused)]
    largest = [max(map(_mean, sets)) for sets in zip(*_errors(reference, plain), strict=True)]
    return [
        [
            (_mean(rows), HEADROOM * (1 + 1 / math.sqrt(rows.numel())) * most)
            for rows, most in zip(places, largest, strict=True)
        ]
        for places in _errors(reference, fused)
    ]


def _errors(expected: Sequence[Observed], found: Sequence[Observed]) -> list[list[Tensor]]:
    """For each set of prompts and each place, the errors of the tokens."""
    return [list(map(token_errors, want.places, got.places)) for want, got in zip(expected, found, strict=True)]


def _worst(errors: Tensor) -> float:
    return _finite(errors.max())


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
