"""What a body says of where it should go."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.replicas.asked import read
from outpace.replicas.choose import LEVELS, cost_of

LONG = "x" * 600


def of(caller: bytes = b"", **body: Any) -> tuple[bytes, ...]:
    """The hashes of a body."""
    return read(json.dumps(body).encode(), caller)[0].prefixes


def test_prompts_with_the_same_beginning_have_hashes_in_common() -> None:
    one, other = of(prompt=LONG + "a" * 2000), of(prompt=LONG + "b" * 2000)
    assert len(one) == len(other) == sum(level <= 2602 for level in LEVELS)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False]
    assert of(prompt="short") == ()


def test_a_conversation_that_goes_on_has_the_hashes_that_it_had() -> None:
    turns = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]
    more = [*turns, {"role": "assistant", "content": LONG}, {"role": "user", "content": LONG}]
    before, after = of(messages=turns), of(messages=more, max_tokens=5)
    assert before
    assert after[: len(before)] == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"caller": b"1"}, {"caller": b"2"}),
        ({"cache_salt": "1"}, {"cache_salt": "2"}),
        ({"prompt_cache_key": "1"}, {}),
        ({"tools": [1]}, {"tools": [2]}),
    ],
)
def test_what_is_cached_apart_has_hashes_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert not set(of(prompt=LONG, **one)) & set(of(prompt=LONG, **other))
    assert of(prompt=LONG, **one) == of(prompt=LONG, **one)


def test_cost_and_user() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 7, "n": 3, "user": "me"}).encode()
    wanted, user = read(body)
    assert (wanted.cost, user) == (cost_of(len(body), 7, 3), "me")
    body = json.dumps({"input": "a", "max_tokens": None}).encode()
    assert read(body)[0].cost == cost_of(len(body), 0)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"n": "x"}', b"\xff", b"[" * 10**6, b'{"user": 1}'])
def test_what_is_wrong_is_left_to_the_replica(body: bytes) -> None:
    wanted, user = read(body)
    assert (wanted.prefixes, user) == ((), None)
    assert wanted.cost >= cost_of(len(body), None)


@given(st.binary(max_size=300))
def test_no_body_is_an_error(body: bytes) -> None:
    read(body)
