from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels import attention_decode, decode_plan
from outpace.kernels.attention import paged_attention
from outpace.kernels.attention_decode import DecodeTiles, empty_parts, paged_attention_decode
from outpace.kernels.attention_torch import paged_attention_torch
from outpace.kernels.decode_plan import DecodePlan, DecodePlans, item_bound, make_plan, part_budget
from tests.kernels.attention_batches import Batch, Case, in_fp64, make_batch
from tests.kernels.test_attention import ALL, FEATURES, SHAPES, check, run
from tests.kernels.tolerances import assert_equal, on_gpu

UNEVEN = ((1, 130), (1, 5), (1, 0), (1, 60), (0, 9), (1, 1), (1, 49))
MIXED = ((1, 150), (5, 90), (1, 49), (0, 0), (1, 7), (2, 2))
TILES = DecodeTiles(block_n=16)


def where() -> torch.device:
    """As the fixture, for tests that hypothesis calls."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parts_of(
    seqs: list[tuple[int, int]], window: int, budget: int, most: int, min_part: int, whole: int = decode_plan.WHOLE
) -> list[int]:
    """Into how many parts each sequence of one query is cut."""
    seen = [min(n, window or n) if q_len == 1 else 0 for q_len, n in seqs]
    total = max(1, sum(seen))
    return [max(1, min(n * budget // total, -(-n // min_part), most)) if n > whole else 1 for n in seen]


def planned(seqs: list[tuple[int, int]], **options: Any) -> DecodePlan:
    lens = torch.tensor([n for _, n in seqs], dtype=torch.int32, device=where())
    cu_q = torch.tensor([0, *(q_len for q_len, _ in seqs)]).cumsum(0).to(where(), torch.int32)
    return make_plan(lens, cu_q, 3, **options)


@settings(max_examples=40, deadline=None, database=None)
@given(
    seqs=st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 2, 40]), st.integers(0, 3000)), min_size=1, max_size=20),
    window=st.sampled_from([0, 0, 1, 200, 4096]),
    budget=st.integers(1, 300),
    most=st.integers(1, 60),
    min_part=st.sampled_from([1, 16, 128]),
    whole=st.sampled_from([0, 100, decode_plan.WHOLE]),
    mixed=st.booleans(),
)
def test_every_part_of_every_sequence_has_one_item(
    seqs: list[tuple[int, int]], window: int, budget: int, most: int, min_part: int, whole: int, mixed: bool
) -> None:
    if not mixed:
        seqs = [(min(q_len, 1), n) for q_len, n in seqs]
    plan = planned(seqs, window=window, budget=budget, most=most, min_part=min_part, whole=whole, mixed=mixed)
    assert len(plan.items) == item_bound(len(seqs), budget, most)
    assert plan.arrived.shape == (len(plan.items), 3)
    assert not plan.arrived.any()
    rows, want = [sum(q_len for q_len, _ in seqs[:s]) for s in range(len(seqs) + 1)], []
    for s, parts in enumerate(parts_of(seqs, window, budget, most, min_part, whole)):
        single, padding = seqs[s][0] == 1, not mixed and s >= rows[-1]
        if single or padding:
            row, keys = (rows[s], seqs[s][1]) if single else (-1, 0)
            want += [[s, part, parts, row, keys, s if padding else -1] for part in range(parts)]
    want.sort(key=lambda item: item[2] == 1)  # the long ones first
    found = plan.items[:, :6].tolist()
    assert found[: len(want)] == want  # so they are no more than the bound
    assert all(item[0] == -1 for item in found[len(want) :])


@settings(database=None)
@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=300),
    st.integers(1, 64),
    st.integers(1, 200),
    st.integers(1, 100),
)
def test_items_are_never_more_than_the_bound(lens: list[int], kv_heads: int, sms: int, most: int) -> None:
    budget = part_budget(len(lens), kv_heads, sms)
    parts = parts_of([(1, n) for n in lens], 0, budget, most, decode_plan.MIN_PART)
    assert sum(parts) <= item_bound(len(lens), budget, most)
    assert all(count == 1 or n > (count - 1) * decode_plan.MIN_PART for n, count in zip(lens, parts, strict=True))


def test_even_batches_are_cut_as_evenly_as_they_were() -> None:
    """8 KV heads on 132 SMs: two programs on each where sequences are few, whole sequences where they are many."""
    for batch, keys, want in ((1, 65536, 33), (8, 8192, 4), (64, 1088, 1), (256, 700, 1), (1, 512, 1), (1, 1024, 8)):
        budget = part_budget(batch, 8, 132)
        assert parts_of([(1, keys)] * batch, 0, budget, 100, decode_plan.MIN_PART) == [want] * batch
    uneven = [(1, 32768)] * 8 + [(1, 300)] * 200 + [(0, 0)] * 48
    assert parts_of(uneven, 0, part_budget(256, 8, 132), 100, decode_plan.MIN_PART) == [6] * 8 + [1] * 248


def test_many_sequences(device: torch.device) -> None:
    seqs = [(1, 5000)] * 3 + [(1, 40)] * 250 + [(0, 0)] * 5
    plan = planned(seqs, budget=50, most=20)
    found = plan.items[:, :3].tolist()
    parts = parts_of(seqs, 0, 50, 20, decode_plan.MIN_PART)
    assert sum(parts[:3]) > 3
    want = [[s, part, count] for s, count in enumerate(parts) for part in range(count)]
    assert [item for item in found if item[0] >= 0] == want


def plan_of(batch: Batch, budget: int, *, mixed: bool = False, most: int = 100) -> DecodePlan:
    _, k_pages, _, _, lens, cu_q, _ = batch.args
    window, kv_heads = batch.case.window, k_pages.shape[2]
    return make_plan(lens, cu_q, kv_heads, most=most, window=window, mixed=mixed, budget=budget, min_part=16, whole=0)


@pytest.fixture(autouse=True)
def _poisoned_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no part has written must not be read."""

    def poisoned(*sizes: Any) -> tuple[torch.Tensor, ...]:
        return tuple(part.fill_(float("nan")) for part in empty_parts(*sizes))

    monkeypatch.setattr(attention_decode, "empty_parts", poisoned)


@pytest.mark.parametrize("changes", [*FEATURES.values(), *SHAPES.values()], ids=[*FEATURES, *SHAPES])
def test_planned_decodes(changes: dict[str, Any], device: torch.device) -> None:
    batch = make_batch(Case(UNEVEN, padding=1, **{"heads": (2, 1), **changes}), device)
    plan, want = plan_of(batch, 11), in_fp64(batch)
    assert plan.items[:, 2].max() > 1 or batch.case.window in (1, 5)
    for fold in (True, False) if changes == ALL else (True,):
        found = run(paged_attention_decode, batch, plan=plan, tiles=TILES, fold=fold)
        check(found, want, batch.case.dtype)
        assert not plan.arrived.any()


@pytest.mark.parametrize(("budget", "block_n"), [(1, 16), (3, 128), (7, 16), (60, 16), (60, 64)])
def test_any_budget(budget: int, block_n: int, device: torch.device) -> None:
    """More parts than a step of the merge takes, and than there are tiles; a plan serves one layer after another."""
    batch = make_batch(Case(((1, 5), (1, 300), (1, 64)), heads=(3, 1), sinks=True), device)
    plan, want = plan_of(batch, budget), in_fp64(batch)
    found = [run(paged_attention_decode, batch, plan=plan, tiles=DecodeTiles(block_n), fold=True) for _ in range(2)]
    check(found[0], want, torch.float32)
    assert_equal(found[1], found[0])
    assert not plan.arrived.any()


@pytest.mark.parametrize("changes", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("fold", [False, True])
def test_planned_decodes_of_a_mixed_batch(fold: bool, changes: dict[str, Any], device: torch.device) -> None:
    batch = make_batch(Case(MIXED, padding=3, heads=(2, 1), **changes), device)
    single = torch.tensor([q_len == 1 for q_len, _ in MIXED for _ in range(q_len)] + [False] * 3, device=device)
    plan = plan_of(batch, 9, mixed=True)
    out = torch.full_like(batch.empty_output(), float("nan"))
    paged_attention_decode(*batch.args, **batch.options, out=out, mixed=True, plan=plan, tiles=TILES, fold=fold)
    check(out[single], in_fp64(batch)[single], torch.float32)
    assert out[~single].isnan().all()


def test_layers_of_a_forward_share_plans(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for each number of keys that layers see, made in the first of them; of windows that are short, none."""
    made: list[int] = []

    def spy(*args: Any, **options: Any) -> DecodePlan:
        made.append(options["window"])
        return make_plan(*args, budget=8, whole=0, **options)

    monkeypatch.setattr(decode_plan, "make_plan", spy)
    plans = DecodePlans()
    for window in (0, 200, 0, 16, 200):
        batch = make_batch(Case(((1, 400), (1, 5), (0, 0)), padding=1, heads=(2, 1), window=window), device)
        check(run(paged_attention_decode, batch, plans=plans), in_fp64(batch), torch.float32)
    assert made == [0, 200]


def test_without_a_plan_one_is_made(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "sm_count", lambda device: 10)
    monkeypatch.setattr(decode_plan, "sm_count", lambda device: 10)
    for fold in (True, False):
        monkeypatch.setattr(attention_decode, "FOLD", fold)
        for seqs in (((1, 400),), ((1, 400), (1, 3), (1, 300), (0, 0))):
            padding = sum(q_len == 0 for q_len, _ in seqs)
            batch = make_batch(Case(seqs, padding=padding, heads=(2, 1), sinks=True), device)
            check(run(paged_attention_decode, batch, max_len=400), in_fp64(batch), torch.float32)


@on_gpu
@pytest.mark.parametrize("shape", [(32, 8, 128), (32, 8, 64), (8, 4, 256), (32, 32, 128), (28, 4, 128), (16, 1, 64)])
@pytest.mark.parametrize("changes", [{}, {**ALL, "window": 900}], ids=["plain", "all"])
def test_one_graph_plans_anew_in_every_replay(
    shape: tuple[int, int, int], changes: dict[str, Any], device: torch.device
) -> None:
    """Lengths change between replays; two layers share a plan; the same lengths give the same bits each time."""
    heads, kv_heads, dim = shape
    slots, page, keys = 256, 64, 3000
    uneven = [(1, keys)] * 2 + [(1, 40)] * 100 + [(1, 1)]
    mixes = [uneven, [(1, 60)] * slots, [(1, keys)], [], [(1, 20 + i) for i in range(100)], uneven]
    cases = [Case((*mix, *[(0, 0)] * (slots - len(mix))), slots - len(mix)) for mix in mixes]
    sizes: dict[str, Any] = {"heads": (heads, kv_heads), "dims": (dim, dim), "page": page, "dtype": torch.bfloat16}
    batches = [make_batch(replace(case, **sizes, **changes), device) for case in cases]
    q, _, _, _, lens, cu_q, _ = (x.clone() if isinstance(x, torch.Tensor) else x for x in batches[0].args)
    k_pages, v_pages = (torch.zeros(700, page, kv_heads, dim, dtype=q.dtype, device=device) for _ in range(2))
    table = torch.zeros(slots, -(-keys // page) + 2, dtype=torch.int32, device=device)
    outs = [torch.empty_like(q) for _ in range(2)]
    options = batches[0].options

    def call() -> None:
        plans = DecodePlans()
        for out in outs:
            args = (q, k_pages, v_pages, table, lens, cu_q, 1)
            paged_attention(*args, **options, out=out, max_len=keys, plans=plans)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for batch in batches:
        new_q, new_keys, values, ids, new_lens, new_cu_q, _ = batch.args
        for static, new in ((q, new_q), (lens, new_lens), (cu_q, new_cu_q), (table[:, : ids.shape[1]], ids)):
            static.copy_(new)
        k_pages[: len(new_keys)], v_pages[: len(values)] = new_keys, values
        want = paged_attention_torch(*batch.args, **options).double()
        graph.replay()
        check(outs[0], want, torch.bfloat16)
        first = outs[0].clone()
        for _ in range(20):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            assert_equal(outs[0], first)
            assert_equal(outs[1], first)
