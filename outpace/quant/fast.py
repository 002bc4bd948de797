"""Which schemes run fast on which device, and why: data, by what the device can multiply."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from outpace.errors import ConfigError
from outpace.quant.scheme import Scheme

FP8_CAPABILITY = (8, 9)  # the first GPUs whose kernels can convert fp8
Fast = Literal["yes", "at few rows", "no", "does not run", "not tried"]
Rows = Mapping[str, tuple[Fast, str]]
"""By scheme: whether it is fast, and why."""

_READS = "a step of few requests takes the time to read the weights, and reads {} of the bytes of 16 bits"
_MANY = "; above 256 rows they are dequantized first"
_WEIGHTS: Rows = {
    "int8": ("at few rows", _READS.format("half") + _MANY),
    "int4": ("at few rows", _READS.format("a quarter") + _MANY),
}
_NO_FP8 = "kernels cannot convert fp8 before compute capability 8.9; take w8a8 or int8"
_UNITS = "matrix units multiply {0} by {0}, at twice the rate of 16 bits, and weights are half as large"
_OLD = "Outpace has not been tried on GPUs before compute capability 8.0"

GPUS: tuple[tuple[tuple[int, int], str, Rows], ...] = (
    (
        (10, 0),
        "Blackwell",
        {
            **_WEIGHTS,
            "w8a8": ("no", "matrix units multiply int8 more slowly than fp8 here; take fp8"),
            "fp8": ("yes", _UNITS.format("fp8")),
        },
    ),
    (
        (9, 0),
        "Hopper",
        {**_WEIGHTS, "w8a8": ("yes", _UNITS.format("int8")), "fp8": ("yes", _UNITS.format("fp8"))},
    ),
    (
        (8, 9),
        "Ada",
        {**_WEIGHTS, "w8a8": ("yes", _UNITS.format("int8")), "fp8": ("yes", _UNITS.format("fp8"))},
    ),
    (
        (8, 0),
        "Ampere",
        {**_WEIGHTS, "w8a8": ("yes", _UNITS.format("int8")), "fp8": ("does not run", _NO_FP8)},
    ),
    ((0, 0), "older", dict.fromkeys(("int8", "int4", "w8a8", "fp8"), ("not tried", _OLD))),
)
"""From this compute capability on: what such GPUs are called, and what runs fast there."""

INT8_FLAGS: Mapping[str, str] = {"amx_int8": "AMX", "avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI"}
"""Instructions of a CPU that multiply int8, as the system calls them and as people do, the fastest first."""


@dataclass(frozen=True)
class Speed:
    """Whether a scheme is fast on a device."""

    scheme: str
    fast: Fast
    why: str


def on_gpu(capability: tuple[int, int]) -> tuple[Speed, ...]:
    """What runs fast on a GPU."""
    rows = next(rows for least, _, rows in GPUS if capability >= least)
    return tuple(Speed(scheme, *found) for scheme, found in rows.items())


def on_cpu(flags: frozenset[str]) -> tuple[Speed, ...]:
    """What runs fast on a CPU with these instructions."""
    name = next((name for flag, name in INT8_FLAGS.items() if flag in flags), None)
    missing: tuple[Fast, str] = ("no", "this CPU has no instructions for int8 (VNNI, AMX)")
    ints: tuple[Fast, str] = ("yes", f"{name} multiplies int8 by int8, and weights are a quarter of fp32")
    digits: tuple[Fast, str] = (
        "at few rows",
        f"rows become digits of int8, and {name} multiplies two or three of each",
    )
    tiles: tuple[Fast, str] = ("at few rows", "torch's int4 kernel reads an eighth of the bytes of fp32")
    rows: Rows = {
        "int8": missing if name is None else digits,
        "int4": tiles if "avx512f" in flags else ("no", "torch's int4 kernel needs AVX-512, and this CPU has none"),
        "w8a8": missing if name is None else ints,
        "fp8": ("no", "CPUs have no instructions for fp8: each weight is dequantized at every product"),
    }
    return tuple(Speed(scheme, *found) for scheme, found in rows.items())


def on_device(device: torch.device) -> tuple[Speed, ...]:
    """What runs fast on a device of this machine."""
    if device.type == "cuda":
        return on_gpu(torch.cuda.get_device_capability(device))
    return on_cpu(cpu_flags())


def runs(scheme: Scheme, device: torch.device) -> bool:
    """Whether the kernels of a scheme run on a device."""
    return scheme.values != "fp8" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def check_runs(schemes: Iterable[Scheme], device: torch.device) -> None:
    """Refuse schemes whose kernels this GPU cannot run."""
    if not all(runs(scheme, device) for scheme in schemes):
        found = torch.cuda.get_device_capability(device)
        raise ConfigError(f"quant: this GPU has compute capability {found[0]}.{found[1]}, and {_NO_FP8}")


def cpu_flags() -> frozenset[str]:
    """Instructions that this CPU has, as Linux calls them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())
