from typing import Any

import pytest
import torch

from outpace.kernels import attention, attention_by_page, attention_torch
from outpace.kernels.attention import paged_attention
from outpace.kernels.attention_decode import DecodeTiles, paged_attention_decode
from outpace.kernels.attention_prefill import PrefillTiles, paged_attention_prefill
from outpace.kernels.attention_torch import paged_attention_torch
from tests.kernels.attention_batches import Batch, Case, in_fp64, make_batch
from tests.kernels.buffers import Output
from tests.kernels.tolerances import assert_close, assert_equal, on_gpu

# Triton's interpreter multiplies the bits of bf16 numbers instead of the numbers.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
ALL: dict[str, Any] = {"window": 21, "softcap": 3.0, "alibi": True, "sinks": True}
DECODES = ((1, 1), (1, 16), (1, 81), (1, 0), (1, 17), (0, 9), (1, 32))  # page borders, and padding in two forms
MIXED = ((1, 20), (37, 53), (1, 1), (0, 9), (17, 17), (3, 0), (2, 48))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window over all": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "all": ALL,
}
SHAPES: dict[str, dict[str, Any]] = {
    "no groups": {"heads": (3, 3), "dims": (64, 64)},
    "groups of 4": {"heads": (8, 2), "dims": (128, 128)},
    "groups of 7": {"heads": (7, 1), "dims": (80, 80), "page": 32},
    "groups of 3": {"heads": (9, 3), "dims": (72, 48), "page": 48},
    "groups of 20": {"heads": (20, 1), "dims": (32, 96)},
    "fp16": {"dtype": torch.float16},
    "half, all": {"dtype": HALF, "dims": (64, 32), **ALL},
}
Runs = list[tuple[Any, dict[str, Any]]]
DECODE: Runs = [
    (paged_attention_torch, {}),
    (paged_attention_torch, {"invariant": True}),
    (paged_attention_decode, {"num_splits": 1}),
    (paged_attention_decode, {"num_splits": 3, "tiles": DecodeTiles(block_n=16)}),
]
PREFILL: Runs = [
    (paged_attention_torch, {}),
    (paged_attention_torch, {"invariant": True}),
    (paged_attention_prefill, {"tiles": PrefillTiles(16, 16)}),
    (paged_attention_prefill, {"invariant": True}),
]
WAYS: dict[str, tuple[tuple[tuple[int, int], ...], int, Runs]] = {
    "decode": (DECODES, 1, DECODE),
    "prefill": (MIXED, 2, PREFILL),
}
"""Sequences, rows of padding, and what runs them."""
BOTH = pytest.mark.parametrize("way", WAYS)


def check(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Scores carry a rounding through exp; 16-bit probabilities are rounded once more before they weigh values."""
    assert_close(found, want, roundings=2, magnitude=1.0 if dtype != torch.float32 else 0.5)


def run(function: Any, batch: Batch, **keywords: Any) -> torch.Tensor:
    """What a function writes into an output between guards."""
    out = Output.like(batch.empty_output(), gap=8)
    assert function(*batch.args, **batch.options, out=out.view, **keywords) is out.view
    return out.checked()


def check_all(case: Case, device: torch.device, runs: Runs) -> None:
    """Functions under some keywords against fp64."""
    batch = make_batch(case, device)
    want = in_fp64(batch)
    for function, keywords in runs:
        check(run(function, batch, **keywords), want, case.dtype)


def default_tiles(runs: Runs) -> Runs:
    """The same with the tiles that launchers choose."""
    return [(function, {name: keywords[name] for name in keywords if name != "tiles"}) for function, keywords in runs]


@BOTH
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_features(way: str, changes: dict[str, Any], device: torch.device) -> None:
    seqs, padding, runs = WAYS[way]
    check_all(Case(seqs, padding, heads=(2, 1), **changes), device, runs)


@BOTH
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_shapes(way: str, changes: dict[str, Any], device: torch.device) -> None:
    seqs, padding, runs = WAYS[way]
    check_all(Case(seqs, padding, **changes), device, [*default_tiles(runs[1:]), (runs[-1][0], {})])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 40])
def test_any_number_of_splits(num_splits: int, device: torch.device) -> None:
    case = Case(((1, 300), (1, 5), (1, 128)), heads=(2, 1), sinks=True)
    keywords = {"num_splits": num_splits, "tiles": DecodeTiles(block_n=16)}
    check_all(case, device, [(paged_attention_decode, keywords)])


def test_prefill_without_any_sequence_writes_zeros(device: torch.device) -> None:
    batch = make_batch(Case(((0, 0), (0, 0)), padding=40), device)
    assert_equal(run(paged_attention_prefill, batch), torch.zeros_like(batch.empty_output()))


@pytest.mark.parametrize("changes", [{}, ALL], ids=["plain", "all"])
def test_in_a_mixed_batch_each_kernel_writes_its_own_rows(changes: dict[str, Any], device: torch.device) -> None:
    batch = make_batch(Case(MIXED, padding=3, **changes), device)
    want = in_fp64(batch)
    single = torch.tensor([q_len == 1 for q_len, _ in MIXED for _ in range(q_len)] + [False] * 3, device=device)
    runs: list[tuple[Any, dict[str, Any], torch.Tensor]] = [
        (paged_attention_decode, {"num_splits": 1}, single),
        (paged_attention_decode, {"num_splits": 3, "tiles": DecodeTiles(block_n=16)}, single),
        (paged_attention_prefill, {}, ~single),
    ]
    for function, keywords, own in runs:
        out = torch.full_like(batch.empty_output(), float("nan"))
        function(*batch.args, **batch.options, out=out, mixed=True, **keywords)
        check(out[own], want[own], torch.float32)
        assert out[~own].isnan().all()


def test_empty_batches(device: torch.device) -> None:
    pages = torch.zeros(1, 16, 1, 32, device=device)
    ints = torch.zeros(1, dtype=torch.int32, device=device)
    for function in (paged_attention_torch, paged_attention_decode, paged_attention_prefill):
        out = function(pages[0, :0], pages, pages, ints[:0, None], ints[:0], ints, 1, scale=1.0)
        assert out.shape == (0, 1, 32)


def test_pages_may_be_interleaved(device: torch.device) -> None:
    batch = make_batch(Case(DECODES, padding=1), device)
    q, k_pages, v_pages, *rest = batch.args
    both = torch.stack([k_pages, v_pages], dim=1)  # [N, 2, bs, Hkv, D]
    batch = Batch(batch.case, (q, both[:, 0], both[:, 1], *rest), batch.options)
    want = in_fp64(batch)
    check(run(paged_attention_torch, batch), want, torch.float32)
    check(run(paged_attention_decode, batch, num_splits=2), want, torch.float32)
    check(run(paged_attention_prefill, batch), want, torch.float32)


@pytest.mark.parametrize("window", [0, 4])
def test_fresh_prompts(window: int, device: torch.device) -> None:
    runs: Runs = [(paged_attention_torch, {}), (paged_attention_prefill, {})]
    check_all(Case(((9, 9), (30, 30), (21, 21)), window=window), device, runs)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 40, 1000])
@pytest.mark.parametrize("keys", [0, 1, 15, 16, 17, 48, 81])
def test_one_token_of_one_sequence(keys: int, window: int) -> None:
    for shape in ({}, {"heads": (9, 3), "dims": (72, 48), "page": 48}, {"heads": (3, 3), "dims": (64, 64)}):
        batch = make_batch(Case(((1, keys),), window=window, **shape), torch.device("cpu"))
        check(run(paged_attention_torch, batch), in_fp64(batch), torch.float32)


@pytest.mark.parametrize("changes", [*FEATURES.values(), *SHAPES.values()], ids=[*FEATURES, *SHAPES])
@pytest.mark.parametrize("threads", [1, 2])
def test_decodes_one_after_another_and_by_pages(
    threads: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_torch, "FEW_DECODES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(attention_by_page, "SLICE_BYTES", 20_000)  # a few items at a time
    monkeypatch.setattr(attention_by_page, "GROUP_BYTES", 10_000)
    case = Case((*DECODES, (7, 30), (1, 128)), padding=1, **changes)
    batch = make_batch(case, torch.device("cpu"))
    check(run(paged_attention_torch, batch), in_fp64(batch), case.dtype)


def test_the_reference_takes_bf16() -> None:
    batch = make_batch(Case(MIXED, padding=1, dtype=torch.bfloat16, **ALL), torch.device("cpu"))
    check(run(paged_attention_torch, batch), in_fp64(batch), torch.bfloat16)


def test_the_reference_chunks_large_scores(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(Case(((20, 100), (1, 90), (5, 7), (33, 33)), **ALL), device)
    monkeypatch.setattr(attention_torch, "SCORE_BYTES", 10_000)
    monkeypatch.setattr(attention_torch, "PIECE_COST", 0)
    check(run(paged_attention_torch, batch), in_fp64(batch), torch.float32)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_public_function(mixed: bool, invariant: bool, device: torch.device) -> None:
    for seqs in (((1, 70), (9, 30), (1, 5)), ((1, 70), (1, 5))):
        batch = make_batch(Case(seqs, padding=1, sinks=True), device)
        check(run(paged_attention, batch, mixed=mixed, invariant=invariant), in_fp64(batch), torch.float32)


def test_which_kernels_run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes to one kernel, others to the other, mixed batches to both, invariant ones to the ragged."""
    calls: list[str] = []

    def spy(function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **keywords)

        return call

    for function in (paged_attention_decode, paged_attention_prefill):
        monkeypatch.setattr(attention, function.__name__, spy(function))
    mixed, invariant = {"mixed": True}, {"invariant": True}
    keywords: dict[str, bool]
    for seqs, padding, keywords, kernels in [
        (((1, 70), (9, 30), (1, 5)), 1, {}, ["prefill"]),
        (((1, 70), (9, 30), (0, 0), (1, 5)), 1, mixed, ["decode", "prefill"]),
        (((1, 70), (1, 5)), 0, {}, ["decode"]),
        (((1, 70), (0, 0)), 1, mixed, ["decode"]),
        (((1, 70), (1, 5)), 2, mixed, ["decode", "prefill"]),
        (((1, 70), (1, 5)), 0, invariant, ["prefill"]),
        (((1, 70), (9, 30), (1, 5)), 0, mixed | invariant, ["prefill"]),
    ]:
        batch = make_batch(Case(seqs, padding=padding), device)
        calls.clear()
        check(run(paged_attention, batch, **keywords), in_fp64(batch), torch.float32)
        assert [name.removeprefix("paged_attention_") for name in calls] == kernels


@on_gpu
def test_one_graph_runs_any_mix(device: torch.device) -> None:
    """The launches depend on (T, S) alone: cu_q, lengths and pages change between replays."""
    rows, seqs, page, columns = 96, 12, 16, 16

    def mix(lengths: list[tuple[int, int]]) -> Batch:
        lengths += [(0, 0)] * (seqs - len(lengths))
        case = Case(tuple(lengths), rows - sum(q for q, _ in lengths), (8, 2), (64, 64), page, torch.bfloat16)
        return make_batch(case, device)

    mixes = [[(1, 100), (40, 40), (1, 3), (20, 200)], [(1, 17 * i + 1) for i in range(12)], [(96, 120)], []]
    batches = [mix(lengths) for lengths in mixes]
    q = torch.zeros(rows, 8, 64, dtype=torch.bfloat16, device=device)
    k_pages, v_pages = (torch.zeros(200, page, 2, 64, dtype=q.dtype, device=device) for _ in range(2))
    table, lens, cu_q = (torch.zeros(n, dtype=torch.int32, device=device) for n in ((seqs, columns), seqs, seqs + 1))
    out = torch.empty_like(q)

    def call() -> None:
        paged_attention(q, k_pages, v_pages, table, lens, cu_q, rows, scale=0.125, out=out, mixed=True, max_len=256)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for batch in batches:
        new_q, keys, values, ids, new_lens, new_cu_q, _ = batch.args
        for static, new in ((q, new_q), (lens, new_lens), (cu_q, new_cu_q), (table[:, : ids.shape[1]], ids)):
            static.copy_(new)
        k_pages[: len(keys)], v_pages[: len(values)] = keys, values
        graph.replay()
        check(out, in_fp64(batch), torch.bfloat16)


def test_the_public_function_refuses_what_does_not_fit(device: torch.device) -> None:
    batch = make_batch(Case(((1, 20),)), device)
    q, k_pages, v_pages, table, lens, cu_q, max_q = batch.args
    for args in [
        (q[..., :16], k_pages, v_pages, table, lens, cu_q),
        (q, k_pages[:1], v_pages, table, lens, cu_q),
        (q[:, :3], k_pages, v_pages, table, lens, cu_q),
        (q, k_pages, v_pages, table, lens, cu_q[:1]),
        (q, k_pages, v_pages, table, lens.long(), cu_q),
        (q.half(), k_pages, v_pages, table, lens, cu_q),
        (q[..., ::2], k_pages[..., :16].contiguous(), v_pages, table, lens, cu_q),
    ]:
        with pytest.raises(ValueError):
            paged_attention(*args, max_q, scale=1.0)
