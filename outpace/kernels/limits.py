"""The limits of a device, measured in the same run as the figures that are compared with them."""

import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GIB = 1 << 30
CPU_BYTES = 1 << 28  # more than caches hold
CPU_MATRIX = 1024


@dataclass(frozen=True)
class Speed:
    """Measured limits of a device."""

    bandwidth: float
    """Bytes read per second."""
    flops: float
    """Operations per second of a large matrix product."""


def measure_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Read bandwidth, and products in `dtype`. On a CPU the best of a few runs, in a fraction of a second."""
    if device.type == "cpu":
        return Speed(_cpu_bandwidth(), _cpu_flops(dtype))
    with torch.cuda.device(device):
        size = min(4 * GIB, torch.cuda.mem_get_info()[0] // 4)
        speed = Speed(read_bandwidth(size), matmul_flops(dtype=dtype))
        torch.cuda.empty_cache()
    return speed


def device_name(device: torch.device) -> str:
    """A short name for file names: h200, cpu-x86_64, ..."""
    if device.type == "cpu":
        return f"cpu-{platform.machine()}"
    return torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used at a time: of the GPU's memory, or on a CPU of the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gpu_ms(run: Callable[[], object], *, warm_ups: int = 5, repeats: int = 50) -> float:
    """Median milliseconds of `run` on the GPU, by events around each call."""
    for _ in range(warm_ups):
        run()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return float(statistics.median(times))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of `run`: the median on a GPU, the best of a few runs on a CPU."""
    return gpu_ms(run, repeats=20) / 1e3 if device.type == "cuda" else _best_seconds(run)


def copy_bandwidth(size: int = 4 * GIB) -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / (gpu_ms(lambda: target.copy_(source), repeats=20) * 1e-3)


def read_bandwidth(size: int = 4 * GIB) -> float:
    """Bytes read per second by a large reduction."""
    source = torch.randint(-128, 127, (size // 4,), dtype=torch.int32, device="cuda")
    return size / (gpu_ms(lambda: source.max(), repeats=20) * 1e-3)


def matmul_flops(size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations per second of a large product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * size**3 / (gpu_ms(lambda: a @ b, repeats=20) * 1e-3)


def _cpu_bandwidth() -> float:
    source = torch.ones(CPU_BYTES // 4, dtype=torch.int32)
    return CPU_BYTES / _best_seconds(lambda: source.max())


def _cpu_flops(dtype: torch.dtype) -> float:
    a, b = (torch.ones(CPU_MATRIX, CPU_MATRIX, dtype=dtype) for _ in range(2))
    return 2 * CPU_MATRIX**3 / _best_seconds(lambda: a @ b)


def _best_seconds(run: Callable[[], object], most: float = 0.15) -> float:
    """The shortest of up to ten runs, within about `most` seconds."""
    times: list[float] = []
    while not times or (sum(times) < most and len(times) < 10):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def link_bandwidth(device: torch.device, size: int = GIB // 2) -> float:
    """Bytes per second copied from page-locked host memory to the device; on a CPU, within its memory."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds_of(lambda: target.copy_(source, non_blocking=True), device)
