"""What a request costs, by its body alone."""

import json
from typing import Any

import pytest

from outpace.deploy.cost import ANSWER, LEAST, LONGEST, MOST_ANSWERS, cost_of


def tokens(**body: Any) -> float:
    """The cost beside that of the prompt."""
    data = json.dumps(body).encode()
    return cost_of(data) - LEAST - len(data) / 16


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, ANSWER),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 10**9}, LONGEST),
        ({"max_tokens": -3}, 0),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 5, "n": 10**9}, 5 * MOST_ANSWERS),
        ({"max_tokens": 5, "n": None}, 5),
        ({"max_tokens": "many"}, 0),
    ],
)
def test_tokens_that_a_request_asks_for(body: dict[str, Any], wanted: float) -> None:
    assert tokens(**body) == wanted


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b"\xff", b"[" * 100_000])
def test_whatever_comes_has_a_cost(body: bytes) -> None:
    assert cost_of(body) == LEAST + len(body) / 16


def test_a_long_prompt_costs_more() -> None:
    assert cost_of(b'{"prompt":"' + b"a" * 4096 + b'"}') > cost_of(b'{"prompt":"a"}') + 200
