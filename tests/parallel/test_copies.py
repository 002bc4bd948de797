"""Copies of hot experts: every expert is somewhere, no rank holds one twice, and the busiest rank has less to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import NotSupported
from outpace.parallel.copies import copies_of, place_experts

loads = st.lists(st.integers(0, 1000), min_size=4, max_size=24)


@given(load=loads, ranks=st.integers(1, 4), extra=st.integers(0, 6))
def test_every_expert_has_a_place_and_no_rank_has_one_twice(load: list[int], ranks: int, extra: int) -> None:
    held, plain = place_experts(len(load), ranks, extra, load), place_experts(len(load), ranks)
    for own, before in zip(held, plain, strict=True):
        assert set(before) <= set(own)
        assert list(own) == sorted(set(own))
        assert len(own) == min(len(load), len(before) + extra)
    assert all(copies_of(held, len(load)))


def test_the_busiest_experts_are_copied_first() -> None:
    load = [100, 1, 1, 1, 40, 1, 0, 0]
    held = place_experts(8, 4, 1, load)
    assert copies_of(held, 8)[0] == [0, 1, 2, 3]
    assert copies_of(held, 8)[4] == [0, 2]
    work = [sum(load[expert] / len(copies_of(held, 8)[expert]) for expert in own) for own in held]
    assert max(work) < 50


def test_without_a_load_they_are_consecutive() -> None:
    assert place_experts(5, 2) == ((0, 1, 2), (3, 4))


def test_more_ranks_than_experts() -> None:
    with pytest.raises(NotSupported, match=r"^moe\.ep_size: .* there are only 4; use fewer ranks"):
        place_experts(4, 5)
