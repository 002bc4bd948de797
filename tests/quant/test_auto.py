"""Which form each weight gets, as pure logic: bounds hold, more room never hurts, small cases are the best there is."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from outpace.quant.auto import STEPS, Choices, Option
from outpace.quant.scheme import Scheme


@st.composite
def weights(draw: st.DrawFn, largest: int = 300) -> list[list[Option]]:
    """Options as measuring finds them: the one that stays adds nothing."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        sizes = draw(st.lists(st.integers(1, largest), min_size=0, max_size=2))
        nats = draw(st.lists(st.floats(0, 10), min_size=len(sizes), max_size=len(sizes)))
        made = [Option(Scheme("int8"), size, each) for size, each in zip(sizes, nats, strict=True)]
        found.append([*made, Option(None, draw(st.integers(0, 2 * largest)), 0.0)])
    return found


def added(options: list[list[Option]], picks: list[int]) -> float:
    return math.fsum(each[pick].nats for each, pick in zip(options, picks, strict=True))


def every(options: list[list[Option]]) -> list[tuple[int, float]]:
    """Bytes and loss of all choices."""
    all_picks = itertools.product(*(range(len(each)) for each in options))
    choices = Choices(options)
    return [(choices.size(picks), added(options, list(picks))) for picks in all_picks]


@given(weights(), st.floats(0, 30))
def test_the_fewest_bytes_below_a_loss(options: list[list[Option]], bound: float) -> None:
    choices = Choices(options)
    picks = choices.least_bytes(bound)
    assert picks is not None, "everything may stay as it is"
    assert len(picks) == len(options)
    assert added(options, picks) <= bound + 1e-9
    assert choices.size(picks) <= min(size for size, nats in every(options) if nats <= bound - 1e-9 or nats == 0)


@given(weights(), st.integers(0, 3000))
def test_the_least_loss_within_some_bytes(options: list[list[Option]], budget: int) -> None:
    choices = Choices(options)
    picks = choices.least_loss(budget)
    fits = [nats for size, nats in every(options) if size <= budget]
    if picks is None:
        assert not fits
        assert choices.smallest > budget
        return
    assert len(picks) == len(options)
    assert choices.size(picks) <= budget
    assert added(options, picks) <= min(fits) + 1e-9


@given(weights(), st.floats(0, 30), st.floats(0, 30), st.integers(0, 3000), st.integers(0, 3000))
def test_more_room_is_never_worse(
    options: list[list[Option]], loss: float, more_loss: float, room: int, more_room: int
) -> None:
    choices = Choices(options)
    tight, loose = choices.least_bytes(loss), choices.least_bytes(loss + more_loss)
    assert tight is not None
    assert loose is not None
    assert choices.size(loose) <= choices.size(tight)
    small, large = choices.least_loss(room), choices.least_loss(room + more_room)
    assert small is None or large is not None
    if small is not None and large is not None:
        assert added(options, large) <= added(options, small) + 1e-9


@given(weights(largest=10**9), st.integers(0, 10**10))
def test_sizes_that_have_no_common_divisor_are_rounded_up_and_stay_in_the_budget(
    options: list[list[Option]], budget: int
) -> None:
    choices = Choices(options)
    picks = choices.least_loss(budget)
    assert (picks is None) == (choices.smallest > budget)
    assert picks is None or choices.size(picks) <= budget


def test_the_table_stays_small_for_many_large_weights() -> None:
    sizes = [(2**22 + number, 2**23 + 7 * number) for number in range(600)]
    options = [
        [Option(Scheme("int4"), few, 1.0), Option(Scheme("int8"), more, 0.1), Option(None, 2**24, 0.0)]
        for few, more in sizes
    ]
    choices = Choices(options)
    budget = 600 * 2**23
    picks = choices.least_loss(budget)
    assert picks is not None
    assert 0.97 * budget < choices.size(picks) <= budget
    assert len(choices._least) <= STEPS + 600 + 1
