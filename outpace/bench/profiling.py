"""Profiles decode steps: how busy the GPU is, how long the host works, which kernels take longest."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from outpace.bench.drive import Driver
from outpace.bench.figures import Figures
from outpace.bench.subject import Subject
from outpace.bench.workload import Item
from outpace.errors import InputError
from outpace.llm_engine import LLMEngine

STEPS = 32
CPU_STEPS = 8  # each has thousands of events
KERNELS = 10
SETTLING = 4  # warm-up steps, twice: without the profiler and with it
MARK = "ProfilerStep"  # what the profiler puts around steps


def profile_decode(subject: Subject, items: Sequence[Item], steps: int | None = None) -> Figures:
    """Fill the batch with requests, wait until all of them decode, and profile some steps.

    The host's time is that of a step without waits for the GPU; it includes the profiler's overhead.
    """
    engine = subject.llm.engine
    on_gpu = subject.llm.device.type == "cuda"
    steps = steps or (STEPS if on_gpu else CPU_STEPS)
    filled = _long_outputs(items[: engine.scheduler.max_num_seqs], engine, steps)
    driver = Driver(engine)
    try:
        traces = [driver.add(item) for item in filled]
        while driver.live and not all(len(trace.times) >= SETTLING for trace in traces):
            driver.step()
        events, seconds, taken = _look(driver, steps, len(traces), on_gpu=on_gpu)
    finally:
        driver.close()
    if not taken:
        raise InputError("profile: requests end before all of them decode; raise max-model-len, or shorten prompts")
    return _summary(events, seconds, taken, len(traces), on_gpu=on_gpu)


def _look(driver: Driver, steps: int, batch: int, *, on_gpu: bool) -> tuple[list[Any], float, int]:
    """Events, seconds and number of steps while all requests of the batch decode, after the warm-up steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    taken = 0
    with profile(activities=activities, schedule=schedule(wait=0, warmup=SETTLING, active=steps)) as profiler:
        for _ in range(SETTLING):
            driver.step()
            profiler.step()
        begin = time.perf_counter()
        while taken < steps and len(driver.live) == batch:
            if taken:
                profiler.step()
            driver.step()
            taken += 1
        seconds = time.perf_counter() - begin
        if on_gpu:
            torch.cuda.synchronize()
    return [event for event in profiler.events() or [] if not event.name.startswith(MARK)], seconds, taken


def _long_outputs(items: Sequence[Item], engine: LLMEngine, steps: int) -> list[Item]:
    """The prompts, with outputs that last until all of them decode and through the profiled steps."""
    chunk = engine.scheduler.max_chunk_beside_decodes
    needed = steps + 3 * SETTLING + sum(-(-len(item.prompt) // chunk) for item in items)
    return [Item(item.prompt, max(1, min(needed, engine.max_model_len - len(item.prompt)))) for item in items]


def _summary(events: Sequence[Any], seconds: float, steps: int, batch: int, *, on_gpu: bool) -> Figures:
    """Times in microseconds. `events`: torch.autograd.profiler_util.FunctionEvent."""
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    waiting = sum(
        event.time_range.elapsed_us()
        for event in events
        if event.device_type.name == "CPU" and event.name.endswith("Synchronize")
    )
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in kernels if on_gpu else events:
        entry = totals[event.name]
        entry[0] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        entry[1] += 1
    longest = sorted(totals.items(), key=lambda pair: -pair[1][0])[:KERNELS]
    return {
        "steps": steps,
        "batch_size": batch,
        "step_us": seconds / steps * 1e6,
        "gpu_busy": covered(spans) / (seconds * 1e6) if on_gpu else None,
        "host_us_per_step": (seconds * 1e6 - waiting) / steps,
        "longest": [
            {"name": name, "us_per_step": total / steps, "calls_per_step": calls / steps}
            for name, (total, calls) in longest
        ],
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Total length of spans, overlaps counted once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
