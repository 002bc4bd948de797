import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels.ragged import Ragged, ragged_inputs_torch, ragged_inputs_triton

POISON = -(2**30)  # read where nothing must be read, it shows


def by_hand(
    tokens: torch.Tensor,
    table: torch.Tensor,
    rows: list[int],
    starts: list[int],
    counts: list[int],
    total: int,
    page: int,
) -> Ragged:
    """One token after another."""
    ids, positions, slots = [], [], []
    for row, start, count in zip(rows, starts, counts, strict=True):
        for position in range(start, start + count):
            ids.append(int(tokens[row, position]))
            positions.append(position)
            slots.append(int(table[row, position // page]) * page + position % page)
    padding = total - len(ids)
    lens = [start + count if count else 0 for start, count in zip(starts, counts, strict=True)]
    return Ragged(
        torch.tensor(ids + [0] * padding, dtype=torch.int64),
        torch.tensor(positions + [0] * padding, dtype=torch.int64),
        torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        table[rows],
        torch.tensor(lens, dtype=torch.int32),
    )


def check(counts: list[int], starts: list[int], padding: int, page: int, device: torch.device) -> None:
    num_rows, reach = len(counts) + 2, max(s + c for s, c in zip(starts, counts, strict=True)) + 1
    pages = -(-reach // page)
    state = torch.full((num_rows, reach + pages + 3), POISON, dtype=torch.int32)
    tokens, table = state[:, :reach], state[:, reach : reach + pages]
    rows = torch.randperm(num_rows)[: len(counts)].tolist()
    for row, start, count in zip(rows, starts, counts, strict=True):
        tokens[row, start : start + count] = torch.randint(0, 1000, (count,), dtype=torch.int32)
        used = -(-(start + count) // page)
        table[row, :used] = torch.randint(0, 50, (used,), dtype=torch.int32)
    total = sum(counts) + padding
    want = by_hand(tokens, table, rows, starts, counts, total, page)
    moved = state.to(device)
    given_ = (moved[:, :reach], moved[:, reach : reach + pages])
    lists = (rows, starts, [0, *torch.tensor(counts).cumsum(0).tolist()])
    arrays = [torch.tensor(values, dtype=torch.int32, device=device) for values in lists]
    for run in (ragged_inputs_torch, ragged_inputs_triton):
        found = run(given_[0], given_[1], arrays[0], arrays[1], arrays[2], total, page)
        for name, mine, expected in zip(Ragged._fields, found, want, strict=True):
            assert mine.dtype == expected.dtype, name
            assert torch.equal(mine.cpu(), expected), (name, run.__name__)


@settings(max_examples=30, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=9),
    padding=st.integers(0, 5),
    page=st.sampled_from([4, 16]),
)
def test_kernel_and_ref_match_a_loop(sequences: list[tuple[int, int]], padding: int, page: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check([count for count, _ in sequences], [start for _, start in sequences], padding, page, device)


@pytest.mark.parametrize(
    ("counts", "starts", "padding"),
    [([1] * 300, list(range(300)), 12), ([0, 0, 0], [0, 0, 0], 4), ([200, 0, 1, 129, 0], [0, 5, 2000, 64, 0], 0)],
    ids=["more decodes than a block", "nothing but padding", "chunks over blocks"],
)
def test_sizes_beyond_one_block(counts: list[int], starts: list[int], padding: int, device: torch.device) -> None:
    check(counts, starts, padding, 16, device)
