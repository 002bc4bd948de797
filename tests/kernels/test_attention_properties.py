import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.kernels.attention import paged_attention
from outpace.kernels.attention_decode import decode_splits, decode_tiles
from outpace.kernels.attention_prefill import paged_attention_prefill, prefill_tiles
from outpace.kernels.attention_torch import paged_attention_torch
from tests.kernels.attention_batches import Batch, Case, in_fp64, make_batch
from tests.kernels.tolerances import assert_equal, on_gpu


@settings(database=None)
@given(st.integers(1, 600), st.integers(1, 64), st.integers(1, 200_000), st.integers(1, 200))
def test_decode_splits_fill_the_device_and_no_more(batch: int, kv_heads: int, max_len: int, sms: int) -> None:
    splits = decode_splits(batch, kv_heads, max_len, sms)
    assert 1 <= splits <= max(1, -(-max_len // 64))
    assert splits == 1 or batch * kv_heads * splits <= 2 * sms
    assert batch * kv_heads <= sms or splits == 1
    if max_len >= 64 * 2 * sms:
        assert batch * kv_heads * splits > sms
    assert (
        decode_splits(batch + 1, kv_heads, max_len, sms) <= splits <= decode_splits(batch, kv_heads, 2 * max_len, sms)
    )


@settings(database=None)
@given(st.integers(1, 80), st.integers(16, 256), st.integers(16, 256), st.sampled_from([2, 4]), st.integers(1, 500))
def test_tiles_are_ones_a_dot_takes(group: int, dim: int, v_dim: int, itemsize: int, max_q: int) -> None:
    decode = decode_tiles(group, dim, v_dim, itemsize)
    prefill = prefill_tiles(max_q, group, dim, v_dim, itemsize)
    for size in (decode.block_n, prefill.block_n, prefill.block_m):
        assert size >= 16
        assert size & (size - 1) == 0
    assert prefill.block_m >= group


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([0, 0, 1, 7, 30]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 4.0]),
)
def test_the_reference_matches_fp64(
    seqs: list[tuple[int, int]], heads: tuple[int, int], window: int, alibi: bool, sinks: bool, softcap: float
) -> None:
    seqs = [(q_len, max(q_len, n) if n else 0) for q_len, n in seqs]
    case = Case(tuple(seqs), 1, heads, (32, 40), window=window, alibi=alibi, sinks=sinks, softcap=softcap)
    batch = make_batch(case, torch.device("cpu"))
    torch.testing.assert_close(
        paged_attention_torch(*batch.args, **batch.options).double(), in_fp64(batch), rtol=0, atol=1e-5
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@st.composite
def features(draw: st.DrawFn, longest: int) -> dict[str, Any]:
    """What scores go through."""
    return {
        "window": draw(st.sampled_from([0, 0, 1, 7, 20, longest])),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "alibi": draw(st.booleans()),
        "sinks": draw(st.booleans()),
    }


@st.composite
def cut(draw: st.DrawFn, lengths: list[int]) -> list[tuple[int, int, int]]:
    """Chunks (sequence, begin, end) in any order: of each sequence none or several, decodes among them."""
    parts: list[tuple[int, int, int]] = []
    for b, n in enumerate(lengths):
        borders = [0, *sorted(draw(st.lists(st.integers(1, n), max_size=3))), n]
        borders = sorted({*borders, *(x - 1 for x in borders[1:] if draw(st.booleans()))})  # one token alone
        parts += [(b, begin, end) for begin, end in itertools.pairwise(borders) if draw(st.booleans())]
    return draw(st.permutations(parts or [(0, 0, lengths[0])]))


def check_invariance(function: Any, whole: Batch, parts: list[tuple[int, int, int]], padding: int) -> None:
    """All chunks in one batch, and each of them alone, against the whole sequences."""
    want = function(*whole.args, **whole.options, invariant=True)
    batch, rows = whole.chunks(parts, padding)
    assert_equal(function(*batch.args, **batch.options, invariant=True)[: len(rows)], want[rows])
    for part in parts[:2]:
        batch, rows = whole.chunks([part])
        assert_equal(function(*batch.args, **batch.options, invariant=True), want[rows])


@pytest.mark.parametrize("count", [1, 2])
@settings(max_examples=25, deadline=None, database=None)
@given(data=st.data())
def test_the_reference_is_invariant(count: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    case = Case(
        tuple((n, n) for n in lengths),
        heads=data.draw(st.sampled_from([(1, 1), (9, 3), (8, 2), (7, 1), (20, 1)])),
        dims=data.draw(st.sampled_from([(32, 32), (64, 64), (128, 128), (40, 24)])),
        page=data.draw(st.sampled_from([16, 48, 64])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        **data.draw(features(150)),
    )
    with threads(count):
        whole = make_batch(case, torch.device("cpu"))
        check_invariance(paged_attention_torch, whole, data.draw(cut(lengths)), data.draw(st.integers(0, 3)))


@pytest.mark.usefixtures("left_to_right")
@settings(max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_kernel_is_invariant(data: st.DataObject) -> None:
    """In the interpreter, which shows what masks and order do; how a GPU rounds, the test below shows."""
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
    case = Case(
        tuple((n, n) for n in lengths),
        heads=data.draw(st.sampled_from([(1, 1), (3, 1), (4, 2)])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float16])),  # bf16: see test_attention.HALF
        **data.draw(features(90)),
    )
    whole = make_batch(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    check_invariance(paged_attention_prefill, whole, data.draw(cut(lengths)), data.draw(st.integers(0, 3)))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@settings(max_examples=15, deadline=None, database=None)
@given(data=st.data())
def test_a_gpu_is_invariant(dtype: torch.dtype, dim: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    heads = data.draw(st.sampled_from([(4, 4), (9, 3), (32, 8), (16, 2)]))
    case = Case(tuple((n, n) for n in lengths), 0, heads, (dim, dim), 64, dtype, **data.draw(features(500)))
    whole = make_batch(case, torch.device("cuda"))
    check_invariance(paged_attention, whole, data.draw(cut(lengths)), data.draw(st.integers(0, 70)))
