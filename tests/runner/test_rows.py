"""Rows of requests on the device, and the headers of steps."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.runner.rows import Layout, Rows
from outpace.types import Request, ScheduledSequence

CPU = torch.device("cpu")
LENGTH = 40  # tokens of a request
PAGES = 5
NOBODY, NOWHERE = 4, LENGTH  # the row and the column that take what is padding


def rows(count: int = NOBODY, length: int = LENGTH) -> Rows:
    return Rows(count, length, PAGES, CPU)


def entry(
    name: str,
    tokens: Sequence[int],
    blocks: Sequence[int] = (),
    *,
    start: int = 0,
    count: int = 0,
    samples: bool = True,
) -> ScheduledSequence:
    """A request that comes in."""
    request = Request(request_id=name, prompt_token_ids=tuple(tokens))
    return ScheduledSequence(
        name, start, count or len(tokens), samples, new_blocks=tuple(blocks), request=request, token_ids=tuple(tokens)
    )


def later(
    name: str, start: int, blocks: Sequence[int] = (), *, count: int = 1, samples: bool = True
) -> ScheduledSequence:
    """A request that goes on."""
    return ScheduledSequence(name, start, count, samples, new_blocks=tuple(blocks))


def indices(layout: Layout) -> list[int]:
    return [owner.index for owner in layout.owners]


def test_tokens_and_pages_get_to_the_row_of_their_request() -> None:
    state = rows()
    a, b = indices(state.take([entry("a", [5, 6, 7], [3]), entry("b", [8, 9], [1, 2])]))
    assert a != b
    assert state.tokens[a, :3].tolist() == [5, 6, 7]
    assert state.tokens[b, :2].tolist() == [8, 9]
    assert state.table[a, :1].tolist() == [3]
    assert state.table[b, :2].tolist() == [1, 2]
    assert len(state) == 2


def test_later_pages_come_behind_the_first_ones() -> None:
    state = rows()
    (a,) = indices(state.take([entry("a", [5, 6], [3])]))
    assert indices(state.take([later("a", 2, [4])])) == [a]
    state.take([later("a", 3)])
    state.take([later("a", 4, [0, 1])])
    assert state.table[a, :4].tolist() == [3, 4, 0, 1]
    assert state.tokens[a, :2].tolist() == [5, 6]


def test_tokens_that_come_later_stand_where_they_begin() -> None:
    """Somebody who schedules by hand gives the tokens of each piece."""
    state = rows()
    (a,) = indices(state.take([entry("a", [5, 6, 7], [3])]))
    state.take([ScheduledSequence("a", 3, 2, False, token_ids=(8, 9))])
    assert state.tokens[a, :5].tolist() == [5, 6, 7, 8, 9]


def test_a_request_that_comes_back_starts_afresh() -> None:
    state = rows()
    state.take([entry("a", [5, 6, 7], [3, 4])])
    state.forget(["a"])
    (a,) = indices(state.take([entry("a", [5, 6, 7, 8], [1])]))
    state.take([later("a", 4, [2])])
    assert state.tokens[a, :4].tolist() == [5, 6, 7, 8]
    assert state.table[a, :2].tolist() == [1, 2]


def test_rows_are_given_back() -> None:
    state = rows()
    names = list("abcd")
    taken = indices(state.take([entry(name, [5]) for name in names]))
    assert sorted(taken) == [0, 1, 2, 3]
    state.forget(["c", "nobody", "c"])
    assert len(state) == 3
    assert indices(state.take([entry("e", [6])])) == [taken[2]]
    state.clear()
    assert len(state) == 0
    assert sorted(indices(state.take([entry(name, [5]) for name in names]))) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_header_is_padded_with_sequences_that_are_nobodys(size: int) -> None:
    state = rows()
    layout = state.take([entry("a", [5] * 9, start=4, count=5), later_of(state, "b", samples=False)])
    header = state.send(layout, size)
    padding = size - 2
    assert header.rows.tolist() == indices(layout) + [NOBODY] * padding
    assert header.starts.tolist() == [4, 2] + [0] * padding
    assert header.writes.tolist() == [9, NOWHERE] + [NOWHERE] * padding
    assert header.cu_q.tolist() == [0, 5, 8] + [8] * padding
    again = state.header(size)
    assert [part.data_ptr() for part in again] == [part.data_ptr() for part in header], "a graph reads another place"


def later_of(state: Rows, name: str, *, samples: bool) -> ScheduledSequence:
    """A piece of three tokens of a request that is there already."""
    state.take([entry(name, [7] * 8)])
    return later(name, 2, count=3, samples=samples)


def test_a_step_of_padding_alone() -> None:
    header = rows().send(Layout(), 3)
    assert header.rows.tolist() == [NOBODY] * 3
    assert header.writes.tolist() == [NOWHERE] * 3
    assert header.cu_q.tolist() == [0] * 4


def test_chosen_tokens_are_written_where_the_header_says() -> None:
    state = rows()
    layout = state.take([entry("a", [5, 6, 7]), entry("b", [8, 9], samples=False)])
    header = state.send(layout, 4)
    state.write(header.rows, header.writes, torch.tensor([41, 42, 43, 44]))
    a, b = indices(layout)
    assert state.tokens[a, :5].tolist() == [5, 6, 7, 41, 0]
    assert state.tokens[b, :4].tolist() == [8, 9, 0, 0]
    assert int(state.tokens[b, NOWHERE]) == 42
    assert state.table.eq(0).all()


def test_the_longest_request_has_room_for_its_last_token() -> None:
    state = rows()
    layout = state.take([entry("a", [5] * (LENGTH - 1), range(PAGES))])
    header = state.send(layout, 1)
    state.write(header.rows, header.writes, torch.tensor([41]))
    assert int(state.tokens[indices(layout)[0], LENGTH - 1]) == 41
    assert state.table[indices(layout)[0]].tolist() == list(range(PAGES))


def test_a_prompt_longer_than_the_staging_buffer() -> None:
    state = rows(count=2, length=40_000)
    text = list(range(30_000))
    for _ in range(3):  # each buffer has to grow, and then serves again
        first, second = indices(state.take([entry("a", text, [1, 2]), entry("b", text[:7], [3])]))
        assert state.tokens[first, :30_000].tolist() == text
        assert state.tokens[second, :7].tolist() == text[:7]
        assert state.table[first, :2].tolist() == [1, 2]
        state.clear()


def test_parts_of_a_step() -> None:
    state = rows()
    layout = state.take([entry("a", [5] * 9), entry("b", [6] * 4, samples=False), entry("c", [7])])
    some = layout.only([2, 0])
    assert (indices(some), some.counts, some.samples) == (
        [layout.owners[2].index, layout.owners[0].index],
        [1, 9],
        [True, True],
    )
    pieces = list(layout.pieces(0, 4))
    assert [(piece.starts, piece.counts, piece.samples) for piece in pieces] == [
        ([0], [4], [False]),
        ([4], [4], [False]),
        ([8], [1], [False]),
    ]
    assert layout.num_tokens == 14


@given(st.data())
def test_rows_always_hold_what_their_requests_were_given(data: st.DataObject) -> None:
    """Requests come, grow and go in any order; a dictionary says what each row has to hold."""
    state, known, taken = rows(), dict[str, tuple[list[int], list[int]]](), 0
    for number in range(data.draw(st.integers(1, 12))):
        gone = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []
        state.forget(gone)
        known = {name: value for name, value in known.items() if name not in gone}
        step = []
        for name in sorted(known):
            tokens, blocks = known[name]
            more = data.draw(st.lists(st.integers(0, 99), max_size=min(1, PAGES - len(blocks))))
            blocks += more
            step.append(later(name, len(tokens) - 1, more))
        while len(step) < NOBODY and data.draw(st.booleans()):
            tokens = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=LENGTH - 15))
            blocks = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=2))
            known[f"{number}-{taken}"] = (tokens, blocks)
            step.append(entry(f"{number}-{taken}", tokens, blocks))
            taken += 1
        layout = state.take(step)
        header = state.send(layout, NOBODY)
        chosen = torch.arange(1000, 1000 + NOBODY)
        state.write(header.rows, header.writes, chosen)
        assert len(set(indices(layout))) == len(step) == len(state)
        for place, item in enumerate(step):
            tokens, blocks = known[item.request_id]
            tokens.append(1000 + place)
            row = layout.owners[place].index
            assert state.tokens[row, : len(tokens)].tolist() == tokens
            assert state.table[row, : len(blocks)].tolist() == blocks
