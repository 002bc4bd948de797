import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels.attention import paged_attention_ref
from outpace.kernels.attention_decode import decode_splits, decode_tiles
from outpace.kernels.attention_prefill import prefill_tiles
from tests.kernels.attention_batches import Case, in_fp64, make_batch


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
        paged_attention_ref(*batch.args, **batch.options).double(), in_fp64(batch), rtol=0, atol=1e-5
    )
