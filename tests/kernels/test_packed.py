"""The form of quantized weights: what it stands for, what it refuses, its parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels.packed import KINDS, Packed, pack_nibbles, unpack_nibbles
from tests.kernels.packing import SCALE_TYPES, random_packed


def by_formula(weight: Packed) -> torch.Tensor:
    """The weight [N, K], one number at a time."""
    rows, columns = weight.shape
    want = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            if weight.kind == "int4":
                byte = int(weight.values[n, k // 2])
                value = float(byte >> 4 if k % 2 else byte & 15)
            else:
                value = float(weight.values[n, k])
            at = n // weight.block, k // weight.group
            zero = weight.default_zero if weight.zero is None else float(weight.zero[at])
            want[n, k] = torch.tensor(value - zero) * weight.scale[at].float()
    return want


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, 9),
    columns=st.integers(1, 13),
    group=st.sampled_from((1, 2, 3, 4, 8, 13, 64)),
    block=st.sampled_from((1, 2, 4, 128)),
    zero=st.booleans(),
    scale_dtype=st.sampled_from(SCALE_TYPES),
)
def test_stands_for_its_formula(
    kind: str, rows: int, columns: int, group: int, block: int, zero: bool, scale_dtype: torch.dtype
) -> None:
    weight = random_packed(kind, (rows, columns), group, block, zero=zero, scale_dtype=scale_dtype)
    want = by_formula(weight)
    torch.testing.assert_close(weight.dequantized(torch.float32), want, rtol=1e-6, atol=1e-7)
    assert torch.equal(weight.dequantized(torch.bfloat16), weight.dequantized(torch.float32).bfloat16())


@given(st.integers(0, 40), st.integers(1, 3))
def test_nibbles_round_trip(columns: int, rows: int) -> None:
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    packed = pack_nibbles(values)
    assert packed.shape == (rows, (columns + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, columns), values)
    if columns:
        assert int(packed[0, 0]) & 15 == int(values[0, 0]), "the first column is in the low half"


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("zero", [False, True])
def test_zero_scales_are_zero_weights(kind: str, zero: bool) -> None:
    weight = random_packed(kind, (3, 7), 4, zero=zero)
    weight.scale.zero_()
    assert not weight.dequantized(torch.float16).any()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("block", [1, 2, 6])
def test_rows_are_views(kind: str, block: int) -> None:
    weight = random_packed(kind, (6, 9), 4, block, zero=True)
    whole = weight.dequantized(torch.float32)
    start, length = (1, 3) if block != 2 else (2, 4)
    part = weight.narrow(start, length)
    assert torch.equal(part.dequantized(torch.float32), whole[start : start + length])
    assert part.values.untyped_storage().data_ptr() == weight.values.untyped_storage().data_ptr()
    if block == 2:
        with pytest.raises(AssertionError, match="cut a block"):
            weight.narrow(1, 2)
    with pytest.raises(AssertionError, match="rows 3 to 7 of 6"):
        weight.narrow(3, 4)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("zero", [False, True])
def test_stacks_of_experts(kind: str, zero: bool) -> None:
    stack = random_packed(kind, (4, 7), 3, experts=3, zero=zero)
    assert (stack.experts, stack[0].experts, stack.shape) == (3, None, (4, 7))
    whole = stack.dequantized(torch.float32)
    assert whole.shape == (3, 4, 7)
    for number in range(3):
        one = stack[number]
        own = Packed(one.values.clone(), one.scale.clone(), None if one.zero is None else one.zero.clone(), (4, 7), 3)
        assert torch.equal(whole[number], own.dequantized(torch.float32))
    assert torch.equal(stack.narrow(1, 2).dequantized(torch.float32), whole[:, 1:3])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("experts", "zero"), [(None, False), (3, True)])
def test_empty_has_the_shapes_and_the_bytes(kind: str, experts: int | None, zero: bool) -> None:
    weight = Packed.empty(kind, (5, 7), 4, experts=experts, with_zero=zero, scale_dtype=torch.float16, device="meta")
    values, scales = 5 * (4 if kind == "int4" else 7), 5 * 2 * 2 * (1 + zero)
    assert weight.nbytes == (experts or 1) * (values + scales)
    assert (weight.kind, weight.device.type, weight.shape) == (kind, "meta", (5, 7))


def test_what_it_refuses() -> None:
    values, scale = torch.zeros(4, 6, dtype=torch.int8), torch.zeros(4, 2)
    Packed(values, scale, None, (4, 6), 3)
    for wrong, message in (
        ((values.int(), scale, None, (4, 6), 3), "int32"),
        ((values, scale, None, (4, 5), 3), "values"),
        ((values, scale, None, (4, 6), 2), "scale"),
        ((values, scale, None, (4, 6), 0), "at least 1"),
        ((values, scale, scale[:1], (4, 6), 3), "zero"),
        ((values, scale.int(), None, (4, 6), 3), "float"),
        ((values[0], scale, None, (4, 6), 3), "neither"),
        ((values, scale, scale.to("meta"), (4, 6), 3), "meta"),
    ):
        with pytest.raises(AssertionError, match=message):
            Packed(*wrong)
    with pytest.raises(AssertionError, match="no experts"):
        Packed(values, scale, None, (4, 6), 3)[0]
