"""Every family that a policy knows, against plain Hugging Face: hidden states, logits and tokens of each variant."""

from typing import Any

import pytest

from tests.inject.checks import LONG, Pair, padded_prompts, pair_of, same_forward, same_paged_logits, same_tokens
from tests.inject.families import CASES, VOCAB, family_model
from tests.inject.mixtures import MIXTURES, mixture


@pytest.fixture(scope="module", params=[*CASES, *MIXTURES], ids=lambda case: "-".join(case) if case in CASES else case)
def pair(request: pytest.FixtureRequest) -> Pair:
    case: Any = request.param
    return pair_of(family_model(*case)) if case in CASES else pair_of(mixture(case), tolerance=1e-5)


def test_forward(pair: Pair) -> None:
    same_forward(pair, padded_prompts(VOCAB))


def test_tokens(pair: Pair) -> None:
    same_tokens(pair, padded_prompts(VOCAB, length=LONG))


def test_paged_logits(pair: Pair) -> None:
    same_paged_logits(pair, VOCAB)
