"""Where layers live: within every budget, spread evenly, and an error that says what is missing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import ConfigError
from outpace.offload.place import Placement, Tier, placements, spread

LAYERS = st.one_of(
    st.lists(st.integers(1, 60), min_size=1, max_size=24),
    st.builds(lambda size, number: [size] * number, st.integers(1, 60), st.integers(1, 40)),
)
BYTES = st.integers(0, 1500)
DISK = st.none() | BYTES
SLOTS = st.integers(1, 3)
STAGING = st.integers(0, 3)


def placed(
    sizes: list[int], device: int, host: int, disk: int | None, slots: int, staging: int = 0
) -> Placement | None:
    try:
        return spread(sizes, device, host, disk, slots, staging=staging)
    except ConfigError:
        return None


def letters(placement: Placement) -> str:
    return "".join({"device": ".", "host": "h", "disk": "d"}[tier] for tier in placement.tiers)


@given(LAYERS, BYTES, BYTES, DISK, SLOTS, STAGING)
def test_no_budget_is_passed(
    sizes: list[int], device: int, host: int, disk: int | None, slots: int, staging: int
) -> None:
    found = placed(sizes, device, host, disk, slots, staging)
    if found is None:
        return
    assert len(found.tiers) == len(sizes)
    assert found.device_bytes(sizes) <= device
    on_disk = [size for size, tier in zip(sizes, found.tiers, strict=True) if tier == "disk"]
    assert sum(on_disk) <= (disk or 0)
    assert found.tier_bytes(sizes, "host") + staging * max(on_disk, default=0) <= host or not found.slots
    if found.slots:
        assert found.slots == slots
        assert found.tiers[0] != "device"
        assert sum(tier != "device" for tier in found.tiers) > slots, "they could stay in the slots"
    else:
        assert set(found.tiers) == {"device"}
    assert found == placed(sizes, device, host, disk, slots, staging)


@given(LAYERS, BYTES, BYTES, DISK, SLOTS, STAGING, st.integers(0, 400))
def test_more_memory_never_streams_more(
    sizes: list[int], device: int, host: int, disk: int | None, slots: int, staging: int, more: int
) -> None:
    small = placed(sizes, device, host, disk, slots, staging)
    if small is None:
        return
    large = placed(sizes, device + more, host, disk, slots, staging)
    assert large is not None
    assert large.tier_bytes(sizes, "device") >= small.tier_bytes(sizes, "device")
    host_too = placed(sizes, device, host + more, disk, slots, staging)
    assert host_too is not None
    assert host_too.tier_bytes(sizes, "device") >= small.tier_bytes(sizes, "device")


@given(LAYERS, BYTES, BYTES, DISK, SLOTS, STAGING)
def test_the_others_have_less_on_disk(
    sizes: list[int], device: int, host: int, disk: int | None, slots: int, staging: int
) -> None:
    if placed(sizes, device, host, disk, slots, staging) is None:
        return
    found = list(placements(sizes, device, host, disk, slots, staging=staging))
    on_disk = [each.tier_bytes(sizes, "disk") for each in found]
    assert on_disk == sorted(set(on_disk), reverse=True)
    if len(set(sizes)) == 1:
        assert len(found) == 1


@given(st.integers(1, 40), BYTES, SLOTS)
def test_streamed_layers_are_spread_evenly(layers: int, device: int, slots: int) -> None:
    found = placed([10] * layers, device, 10_000, None, slots)
    if found is None or not found.slots:
        return
    streamed = [place for place, tier in enumerate(found.tiers) if tier != "device"]
    gaps = [later - earlier for earlier, later in zip(streamed, [*streamed[1:], layers], strict=True)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("device", "host", "disk", "expected"),
    [
        (80, 0, None, "........"),
        (79, 80, None, "h.h..h.."),
        (60, 80, None, "h.h.h.h."),
        (20, 80, None, "hhhhhhhh"),
        (20, 40, 80, "dhdhdhdh"),
        (60, 20, 80, "d.h.d.h."),
        (20, 0, 80, "dddddddd"),
    ],
)
def test_eight_layers(device: int, host: int, disk: int | None, expected: str) -> None:
    assert letters(spread([10] * 8, device, host, disk, 2)) == expected


def test_layers_from_disk_pass_through_buffers_in_host_memory() -> None:
    assert letters(spread([10] * 4, 20, 20, 80, 2)) == "dhdh"
    assert letters(spread([10] * 4, 20, 20, 80, 2, staging=1)) == "dddh"
    with pytest.raises(ConfigError, match="host memory takes 20 bytes"):
        spread([10] * 4, 20, 20, 80, 2, staging=3)


def test_where_layers_differ_the_largest_ones_need_not_be_streamed() -> None:
    tiers: tuple[Tier, ...] = ("host", "device", "host", "device")
    assert spread([10, 100, 10, 100], 210, 200, None, 1) == Placement(tiers, 1)


def test_too_small_a_device_says_how_much_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^offload\.device_memory: 15 bytes .* 2 slots .* 20 bytes.* 5 bytes more"):
        spread([10] * 8, 15, 80, None, 2)


def test_too_small_a_host_says_how_much_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^offload: 80 bytes of 80 .* 30 bytes are missing.*offload\.nvme"):
        spread([10] * 8, 20, 50, None, 2)
    with pytest.raises(ConfigError, match=re.escape("the disk takes 20 bytes: 10 bytes are missing")):
        spread([10] * 8, 20, 50, 20, 2)
