"""One token per row: the kernel draws what the reference draws, whatever the tiles and the rest of the batch."""

from dataclasses import dataclass, replace

import pytest
import torch

from outpace.kernels.draw import SPLITMIX, Drawing, draw_torch, draw_triton, hashed
from tests.kernels.buffers import poisoned
from tests.kernels.tolerances import DTYPES, on_gpu

# numpy's words on what a GPU does in silence, in lanes that are not kept
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")

SHAPES = [(1, 1), (3, 2), (8, 17), (6, 300), (2, 1000)]
SMALL = {"block": 64, "num_warps": 2}  # so that short rows take several passes too
INF, NAN = float("inf"), float("nan")


@dataclass
class Rows:
    """The arguments of a draw."""

    logits: torch.Tensor
    how: Drawing

    def all(self) -> tuple[torch.Tensor, Drawing]:
        return self.logits, self.how

    def part(self, rows: slice | list[int]) -> "Rows":
        return Rows(self.logits[rows].contiguous(), Drawing(*(value[rows].contiguous() for value in self.how)))

    def kernel(self, config: dict[str, int] | None = None) -> torch.Tensor:
        return draw_triton(*self.all(), config=config)


def rows_of(logits: torch.Tensor, **given: float) -> Rows:
    """The logits with the same parameters in every row; another key in each."""
    count, device = len(logits), logits.device
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | given
    floats = {name: torch.full((count,), values[name], device=device) for name in ("temperature", "top_p", "min_p")}
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    top_k = zeros + int(given.get("top_k", 0))
    return Rows(logits, Drawing(top_k=top_k, keys=keys.to(device), counters=zeros, **floats))


def varied(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows:
    """Rows of all kinds: greedy, free, and every combination of filters."""
    random = torch.Generator().manual_seed(shape[0] * shape[1])
    rows = rows_of(poisoned((4 * torch.randn(shape, generator=random)).to(dtype), gap=5).to(device))
    at = torch.arange(shape[0])
    top_k = torch.where(at % 2 == 0, torch.randint(1, min(shape[1], 200) + 1, shape[:1], generator=random), 0)
    rows.how = Drawing(
        temperature=torch.where(at % 7 == 6, 0.0, torch.rand(shape[0], generator=random) * 2 + 0.1).to(device),
        top_k=top_k.to(device),
        top_p=torch.where(at % 3 != 1, torch.rand(shape[0], generator=random) * 0.9 + 0.1, 1.0).to(device),
        min_p=torch.where(at % 5 == 3, 0.05, 0.0).to(device),
        keys=rows.how.keys,
        counters=torch.randint(0, 9999, shape[:1], generator=random).to(device),
    )
    return rows


def test_the_hash_is_splitmix64() -> None:
    keys, counters = [0, 1, -1, 2**63 - 1, -(2**63), 12345], [0, 1, 2, 77, 2**40, 5]
    want = []
    for key, counter in zip(keys, counters, strict=True):
        z = (key + (counter + 1) * SPLITMIX[0]) % 2**64
        z = (z ^ (z >> 30)) * SPLITMIX[1] % 2**64
        z = (z ^ (z >> 27)) * SPLITMIX[2] % 2**64
        want.append((z ^ (z >> 31)) >> 33)
    assert hashed(torch.tensor(keys), torch.tensor(counters)).tolist() == want
    assert hashed(torch.tensor([0]), torch.tensor([0])).item() == 0xE220A8397B1DCDAF >> 33  # its published first output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_draws_what_the_ref_draws(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows = varied(shape, dtype, device)
    want = draw_torch(*rows.all())
    assert want.shape == shape[:1]
    assert torch.equal(rows.kernel(), want)
    if shape[1] > SMALL["block"]:
        assert torch.equal(rows.kernel(SMALL), want)


def test_a_row_alone_and_in_another_dtype(device: torch.device) -> None:
    rows = varied((7, 300), torch.bfloat16, device)
    want = rows.kernel()
    assert torch.equal(replace(rows, logits=rows.logits.float()).kernel(), want)
    alone = torch.cat([rows.part(slice(row, row + 1)).kernel() for row in range(7)])
    assert torch.equal(alone, want)


def test_without_filters_nothing_is_listed_and_the_same_is_drawn(device: torch.device) -> None:
    rows = rows_of(torch.randn(5, 200, device=device), min_p=0.1, temperature=0.8)
    for draw in (draw_torch, draw_triton):
        assert torch.equal(draw(*rows.all(), filtered=False), draw(*rows.all()))


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 4, "top_p": 0.7}])
def test_tokens_that_tie_with_the_threshold_are_all_kept(filters: dict[str, float], device: torch.device) -> None:
    # weights 1, then six of one half: every filter's threshold is among the six
    weights = torch.tensor([0.5, 0.01, 1.0, 0.5, 0.5, 0.01, 0.5, 0.5, 0.5])
    rows = rows_of(weights.log().to(device).expand(400, 9).contiguous(), **filters)
    drawn = draw_torch(*rows.all())
    assert drawn.unique().tolist() == [0, 2, 3, 4, 6, 7, 8]
    first = [int((drawn == token).nonzero()[0]) for token in (0, 2, 8)]
    assert rows.part(first).kernel().tolist() == [0, 2, 8]


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.1}])
def test_a_min_p_of_minus_zero_changes_nothing(filters: dict[str, float], device: torch.device) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5)).to(device).expand(6, 300).contiguous()
    drawn = rows_of(logits, min_p=-0.0, **filters).kernel(SMALL)
    assert torch.equal(drawn, rows_of(logits, min_p=0.0, **filters).kernel(SMALL))
    assert torch.equal(drawn, draw_torch(*rows_of(logits, min_p=-0.0, **filters).all()))


@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 150, 299, 300])
def test_top_k_below_and_above_the_number_of_lanes(top_k: int, device: torch.device) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3)).to(device)
    kept = set(logits[0].topk(top_k).indices.tolist())
    rows = rows_of(logits.expand(3, 300).contiguous(), top_k=top_k, temperature=50.0)
    drawn = rows.kernel(SMALL)
    assert set(drawn.tolist()) <= kept
    assert torch.equal(drawn, draw_torch(*rows.all()))


def test_a_nucleus_of_a_flat_row_and_the_smallest_one(device: torch.device) -> None:
    flat = torch.linspace(0, 1e-3, 300, device=device).expand(2, 300).contiguous()
    for top_p in (1e-9, 0.7):
        rows = rows_of(flat, top_p=top_p)
        drawn = rows.kernel(SMALL)
        assert torch.equal(drawn, draw_torch(*rows.all()))
        assert drawn.min() >= 300 * (1 - top_p) - 2
    assert (rows_of(torch.zeros(2, 300, device=device), top_p=1e-9).kernel(SMALL) < 300).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 100.0])
def test_banned_infinite_and_missing_logits(temperature: float, device: torch.device) -> None:
    logits = torch.full((5, 130), -INF)
    logits[0, 77] = -1e30  # the one token that may be drawn
    logits[1, [3, 100]] = torch.tensor([INF, INF])  # the first
    logits[2, 5:9] = torch.tensor([NAN, 2.0, NAN, -INF])
    logits[3, 129] = 1e30
    none: dict[str, float] = {}
    for filters in (none, {"top_k": 2, "top_p": 0.9}):
        rows = rows_of(logits.to(device), temperature=temperature, **filters)
        for drawn in (draw_torch(*rows.all()), rows.kernel(SMALL)):
            assert drawn.tolist() == [77, 3, 6, 129, 0]


def test_no_rows(device: torch.device) -> None:
    assert rows_of(torch.randn(0, 9, device=device)).kernel().shape == (0,)


@on_gpu
def test_a_real_vocabulary_on_a_gpu() -> None:
    rows = varied((64, 128_256), torch.bfloat16, torch.device("cuda"))
    want = draw_torch(*rows.all())
    assert torch.equal(rows.kernel(), want)
    assert torch.equal(rows.kernel({"block": 2048, "num_warps": 8}), want)
