"""A table of which schemes run fast on which GPU or CPU, and why."""

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
"""Scheme -> whether it is fast, and why."""

_READS = "a step of few requests is bound by reading the weights, and reads {} of the bytes of 16-bit weights"
_MANY = "; above 256 rows weights are dequantized first"
_WEIGHTS: Rows = {
    "int8": ("at few rows", _READS.format("half") + _MANY),
    "int4": ("at few rows", _READS.format("a quarter") + _MANY),
}
_NO_FP8 = "kernels cannot convert fp8 before compute capability 8.9; take w8a8 or int8"
_UNITS = "matrix units multiply {0} by {0} at twice the rate of 16 bits, and weights are half as large"
_OLD = "Outpace has not been tried on GPUs before compute capability 8.0"

_W8A8: Rows = {"w8a8": ("yes", _UNITS.format("int8"))}
_FP8: Rows = {"fp8": ("yes", _UNITS.format("fp8"))}
_SLOW_INT8 = "matrix units multiply int8 more slowly than fp8 here; take fp8"

GPUS: tuple[tuple[tuple[int, int], str, Rows], ...] = (
    ((10, 0), "Blackwell", {**_WEIGHTS, "w8a8": ("no", _SLOW_INT8), **_FP8}),
    ((9, 0), "Hopper", {**_WEIGHTS, **_W8A8, **_FP8}),
    ((8, 9), "Ada", {**_WEIGHTS, **_W8A8, **_FP8}),
    ((8, 0), "Ampere", {**_WEIGHTS, **_W8A8, "fp8": ("does not run", _NO_FP8)}),
    ((0, 0), "older", dict.fromkeys(("int8", "int4", "w8a8", "fp8"), ("not tried", _OLD))),
)
"""(lowest compute capability, name of the generation, what runs fast there), newest first."""

INT8_FLAGS: Mapping[str, str] = {"amx_int8": "AMX", "avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI"}
"""Linux's flag of an instruction set that multiplies int8 -> its usual name, fastest first."""


@dataclass(frozen=True)
class SchemeSpeed:
    """Whether a scheme is fast on a device."""

    scheme: str
    fast: Fast
    why: str


def on_gpu(capability: tuple[int, int]) -> tuple[SchemeSpeed, ...]:
    rows = next(rows for least, _, rows in GPUS if capability >= least)
    return tuple(SchemeSpeed(scheme, *found) for scheme, found in rows.items())


def on_cpu(flags: frozenset[str]) -> tuple[SchemeSpeed, ...]:
    """The speed of each scheme on a CPU with these instruction sets."""
    name = next((name for flag, name in INT8_FLAGS.items() if flag in flags), None)
    missing: tuple[Fast, str] = ("no", "this CPU has no instructions for int8 (VNNI, AMX)")
    ints: tuple[Fast, str] = ("yes", f"{name} multiplies int8 by int8, and weights are a quarter of fp32")
    digits: tuple[Fast, str] = (
        "at few rows",
        f"each activation is split into two or three int8 digits, which {name} multiplies",
    )
    tiles: tuple[Fast, str] = ("at few rows", "torch's int4 kernel reads an eighth of the bytes of fp32")
    rows: Rows = {
        "int8": missing if name is None else digits,
        "int4": tiles if "avx512f" in flags else ("no", "torch's int4 kernel needs AVX-512, and this CPU has none"),
        "w8a8": missing if name is None else ints,
        "fp8": ("no", "CPUs have no instructions for fp8: each weight is dequantized at every product"),
    }
    return tuple(SchemeSpeed(scheme, *found) for scheme, found in rows.items())


def on_device(device: torch.device) -> tuple[SchemeSpeed, ...]:
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


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Linux's names of this CPU's instruction sets; empty on other systems."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())
