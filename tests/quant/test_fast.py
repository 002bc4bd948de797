"""Which schemes run fast where: every device knows every scheme, and the facts that decide it."""

import pytest
import torch

from outpace import ConfigError
from outpace.quant.asked import NAMED
from outpace.quant.fast import GPUS, check_runs, on_cpu, on_gpu

FAST: dict[str, tuple[str, ...]] = {
    "7.5": (),
    "8.0": ("w8a8",),
    "8.6": ("w8a8",),
    "8.9": ("fp8", "w8a8"),
    "9.0": ("fp8", "w8a8"),
    "10.0": ("fp8",),
    "12.0": ("fp8",),
}


@pytest.mark.parametrize("capability", FAST)
def test_gpus(capability: str) -> None:
    major, minor = map(int, capability.split("."))
    found = on_gpu((major, minor))
    assert {each.scheme for each in found} == set(NAMED)
    assert tuple(sorted(each.scheme for each in found if each.fast == "yes")) == FAST[capability]
    runs = {each.scheme: each.fast for each in found}
    assert (runs["fp8"] == "does not run") == ((8, 0) <= (major, minor) < (8, 9))


def test_fp8_is_refused_where_no_kernel_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_runs([NAMED["int8"], NAMED["w8a8"]], gpu)
    check_runs([NAMED["fp8"]], torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^quant: this GPU has compute capability 8\.6, and kernels cannot"):
        check_runs([NAMED["int8"], NAMED["fp8"]], gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_runs([NAMED["fp8"]], gpu)


def test_the_table_begins_with_the_newest() -> None:
    order = [least for least, _, _ in GPUS]
    assert order == sorted(order, reverse=True)
    assert order[-1] == (0, 0)


def test_cpus() -> None:
    plain, new = on_cpu(frozenset({"avx2"})), on_cpu(frozenset({"avx2", "avx512_vnni"}))
    assert {each.scheme for each in plain} == set(NAMED)
    assert [each.scheme for each in plain if each.fast == "yes"] == []
    tiles = {each.scheme: each.fast for each in on_cpu(frozenset({"avx512f"}))}
    assert tiles == {"int8": "no", "int4": "at few rows", "w8a8": "no", "fp8": "no"}
    assert [(each.scheme, each.why.split()[0]) for each in new if each.fast == "yes"] == [("w8a8", "AVX512-VNNI")]
