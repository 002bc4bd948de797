"""Which layers each stage has, in how many parts, and whose turn it is."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import ConfigError
from outpace.parallel.pipeline import block_of, stage_of
from outpace.parallel.spans import Span
from outpace.parallel.stages import as_asked, balanced, bubble, parts_of
from outpace.runner.staged_sequences import SequenceGroup, next_group
from outpace.types import ScheduledSequence

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=8)


def worst(layers: list[int], spans: tuple[Span, ...], first: int, last: int) -> tuple[int, int]:
    """What the slowest stage reads, and what the largest holds."""
    reads = [sum(layers[start:stop]) + (last if stop == len(layers) else 0) for start, stop in spans]
    return max(reads), max(each + (first if stage == 0 else 0) for stage, each in enumerate(reads))


def every(count: int, stages: int) -> list[tuple[Span, ...]]:
    """All ways to cut so many layers."""
    cuts = [(0, *some, count) for some in combinations(range(1, count), stages - 1)]
    return [tuple(pairwise(cut)) for cut in cuts]


@given(layers=sizes, stages=st.integers(1, 5), first=st.integers(0, 100), last=st.integers(0, 100))
def test_balanced_stages_are_the_best_there_are(layers: list[int], stages: int, first: int, last: int) -> None:
    if stages > len(layers):
        with pytest.raises(ConfigError, match=r"pp_size: .* ask for fewer stages"):
            balanced(layers, stages, first, last)
        return
    spans = balanced(layers, stages, first, last)
    assert spans in every(len(layers), stages), "all layers, in order, and no stage without any"
    best = min(worst(layers, each, first, last) for each in every(len(layers), stages))
    assert worst(layers, spans, first, last) == best


@given(layers=st.lists(st.integers(1, 9), min_size=1, max_size=6), more=st.integers(-3, 3))
def test_layers_as_they_are_asked_for(layers: list[int], more: int) -> None:
    count = sum(layers) + more
    if more:
        with pytest.raises(ConfigError, match=rf"layers: .* are {sum(layers)} layers, and the model has {count}"):
            as_asked(layers, count)
        return
    spans = as_asked(layers, count)
    assert [stop - start for start, stop in spans] == layers
    assert spans in every(count, len(layers))


@given(count=st.integers(1, 60), parts=st.integers(1, 20))
def test_parts_are_even_and_have_everything_once(count: int, parts: int) -> None:
    found = parts_of(count, parts)
    assert [place for start, stop in found for place in range(start, stop)] == list(range(count))
    assert len(found) == min(count, parts)
    lengths = {stop - start for start, stop in found}
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) > 0


@given(stages=st.integers(1, 9))
def test_the_first_block_has_the_last_stage(stages: int) -> None:
    assert stage_of(0, stages) == stages - 1
    assert sorted(stage_of(block, stages) for block in range(stages)) == list(range(stages))
    assert all(block_of(stage_of(block, stages), stages) == block for block in range(stages))


def test_a_bubble() -> None:
    assert bubble(1, 7) == 0
    assert bubble(4, 1) == 3 / 4
    assert bubble(2, 16) == 1 / 17


@given(
    work=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6),
    stages=st.integers(2, 4),
)
def test_whose_turn_it_is(work: list[tuple[int, int]], stages: int) -> None:
    """Groups with so many pieces of prompts and tokens after them: decode first, the oldest first, nobody for ever."""
    piece = [ScheduledSequence("", 0, 1, False)]
    groups = [SequenceGroup(range(number, number + 1), [piece] * chunks) for number, (chunks, _) in enumerate(work)]
    left = [chunks + tokens for chunks, tokens in work]
    going, now, total = list(groups), 0, sum(left)
    while (group := next_group(going, now, stages)) is not None:
        number = groups.index(group)
        known = [each for each in going if not each.chunks and each.since <= now - stages]
        if known:
            assert group is min(known, key=lambda each: each.since), "the tokens of this one are known for longest"
        elif any(each.chunks for each in going):
            assert group.chunks, "rather a prompt than wait"
            assert group is next(each for each in going if each.chunks), "prompts in their order"
        if not left[number]:
            going.remove(group)
            continue
        if group.chunks:
            group.chunks.pop(0)
        left[number] -= 1
        group.since, now = now, now + 1
    assert now == total, "everybody has had all"
    assert not any(left)
