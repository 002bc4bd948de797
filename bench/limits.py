"""The device's own limits, measured in the same run as the figures that stand beside them."""

import platform
import statistics
from collections.abc import Callable

import torch


def device_name(device: torch.device) -> str:
    """A short name for file names: h200, cpu, ..."""
    if device.type == "cpu":
        return f"cpu-{platform.machine()}"
    return torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")


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


def copy_bandwidth(size: int = 4 << 30) -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / (gpu_ms(lambda: target.copy_(source), repeats=20) * 1e-3)


def read_bandwidth(size: int = 4 << 30) -> float:
    """Bytes read per second by a large reduction."""
    source = torch.randint(-128, 127, (size // 4,), dtype=torch.int32, device="cuda")
    return size / (gpu_ms(lambda: source.max(), repeats=20) * 1e-3)


def matmul_flops(size: int = 8192) -> float:
    """Operations per second of a large bf16 product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (gpu_ms(lambda: a @ b, repeats=20) * 1e-3)
