"""Spans of ranks: every index once, as evenly as possible, and heads with the keys they use."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import NotSupported
from outpace.parallel.spans import LAYOUTS, Heads, Split, even, halves, scaled, split_heads

SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(  # key heads, query heads of each
    lambda shape: st.tuples(st.just(shape[0] * shape[1]), st.just(shape[0]), st.integers(1, shape[0] * shape[1]))
)


def indices(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, stop in spans for index in range(start, stop)]


@given(st.integers(1, 300), st.integers(1, 16))
def test_every_index_once_and_sizes_differ_by_one(more: int, ranks: int) -> None:
    size = ranks + more - 1
    spans = even(size, ranks, "rows")
    assert indices(spans) == list(range(size))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1
    if size % ranks == 0:
        assert sizes == [len(chunk) for chunk in torch.arange(size).chunk(ranks)]


@given(SHAPES)
def test_heads_have_the_keys_they_use(shape: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, ranks = shape
    found, group = split_heads(num_heads, num_kv_heads, ranks), num_heads // num_kv_heads
    assert len(found) == ranks
    assert indices(tuple(heads.query for heads in found)) == list(range(num_heads))
    keys = indices(tuple(heads.kv for heads in found))
    assert set(keys) == set(range(num_kv_heads))
    assert ranks < num_kv_heads or len(keys) == ranks
    for heads in found:
        used = {head // group for head in range(*heads.query)}
        assert used == set(range(*heads.kv))
        assert (heads.query[1] - heads.query[0]) % len(used) == 0, "the same number of heads for each key head"
    held = [heads.kv[1] - heads.kv[0] for heads in found]
    assert max(held) - min(held) <= 1


def owners(layout: str, num_heads: int, num_kv_heads: int) -> list[tuple[str, int]]:
    """What each unit of a fused qkv is, written from the definition of the layout."""
    group = num_heads // num_kv_heads
    query, key, value = ([(kind, n) for n in range(num_heads if kind == "q" else num_kv_heads)] for kind in "qkv")
    if layout == "rows":
        return [*query, *key, *value]
    if layout == "heads":
        return [unit for three in zip(query, key, value, strict=True) for unit in three]
    if layout == "groups":
        return [u for n in range(num_kv_heads) for u in (*query[n * group : (n + 1) * group], key[n], value[n])]
    part = num_heads // 4
    return [u for n in range(4) for units in (query, value, key) for u in units[n * part : (n + 1) * part]]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(shape=SHAPES)
def test_a_fused_qkv_is_cut_by_heads(layout: str, shape: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, ranks = shape
    if layout in ("heads", "quarters"):
        num_kv_heads = num_heads = num_heads * (4 if layout == "quarters" else 1)
    units = owners(layout, num_heads, num_kv_heads)
    for heads in split_heads(num_heads, num_kv_heads, ranks):
        spans = scaled(LAYOUTS[layout](heads, num_heads, num_kv_heads), 1)
        assert list(spans) == sorted(spans)
        wanted = {("q", n) for n in range(*heads.query)} | {(kind, n) for kind in "kv" for n in range(*heads.kv)}
        found = [units[index] for index in indices(spans)]
        assert len(found) == len(wanted)
        assert set(found) == wanted


@given(SHAPES.filter(lambda shape: shape[2] <= shape[1]))
def test_a_part_of_a_fused_qkv_has_the_layout_of_the_whole(shape: tuple[int, int, int]) -> None:
    """So that what runs a rank reads its part with its own numbers of heads."""
    num_heads, num_kv_heads, ranks = shape
    for layout in ("rows", "groups"):
        units = owners(layout, num_heads, num_kv_heads)
        for heads in split_heads(num_heads, num_kv_heads, ranks):
            part = [units[n] for n in indices(scaled(LAYOUTS[layout](heads, num_heads, num_kv_heads), 1))]
            local = owners(layout, heads.query[1] - heads.query[0], heads.kv[1] - heads.kv[0])
            first = {"q": heads.query[0], "k": heads.kv[0], "v": heads.kv[0]}
            assert part == [(kind, n + first[kind]) for kind, n in local]


def test_spans_in_units_and_halves() -> None:
    assert scaled([(0, 2), (2, 3), (5, 6), (6, 6)], 4) == ((0, 12), (20, 24))
    assert halves((1, 3), 10) == ((1, 3), (11, 13))
    assert Split(0, (((0, 2), (4, 6)), ((2, 4),))).sizes() == (4, 2)
    assert split_heads(8, 2, 3) == (Heads((0, 2), (0, 1)), Heads((2, 4), (0, 1)), Heads((4, 8), (1, 2)))


def test_more_ranks_than_there_is_to_split() -> None:
    with pytest.raises(NotSupported, match="4 attention heads cannot be split over 5 ranks; use fewer"):
        split_heads(4, 2, 5)
    with pytest.raises(NotSupported, match="the rows of x cannot be split over 4 ranks: there are only 3"):
        even(3, 4, "the rows of x")
