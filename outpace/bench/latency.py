"""Latency: one request, or a batch that starts together, with nothing else running."""

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from outpace.bench.drive import run
from outpace.bench.figures import Figures, Trace, percentile
from outpace.bench.subject import Subject
from outpace.bench.workload import Item, check_least, check_lengths, latency_prompt
from outpace.types import SamplingParams

WARM_UPS = 2
COUNTED = 32  # most tokens of each warm-up request that counts experts
PERCENTS = (10, 25, 50, 75, 90, 99)


def latency(
    subject: Subject, *, batch_size: int = 1, input_len: int = 128, output_len: int = 256, iters: int = 3
) -> Figures:
    """Time to the first token and tokens/s after it, through `LLM.generate`, as the median of `iters`.

    Decode tokens/s = (output_len - 1) / (time for output_len tokens - time for 1 token), for each request of the batch.
    """
    sizes = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len}
    check_least(1, batch_size=batch_size, input_len=input_len, iters=iters)
    check_least(2, output_len=output_len)
    prompts = _prompts(subject, batch_size, input_len, output_len)
    if subject.llm.engine.experts is not None:  # the warm-up counts which experts are touched
        subject.warm_up([Item(prompt, min(output_len, COUNTED)) for prompt in prompts])
    whole, first = (_times(subject, prompts, length, iters) for length in (output_len, 1))
    ttft = statistics.median(first)
    decode = (output_len - 1) / (statistics.median(whole) - ttft)
    ours = {**subject.facts(), **sizes, "limit": None, "ratio": None, "ratio_ttft": None}
    if (cost := subject.cost) is not None:
        step = cost.decode_seconds(batch_size, input_len + output_len / 2, subject.speed)
        prompt = cost.prompt_seconds(batch_size, input_len, subject.speed)
        ours["limit"] = {"decode_tokens_per_second": 1 / step, "ttft_ms": prompt * 1e3}
        ours |= {"ratio": decode * step, "ratio_ttft": prompt / ttft, **subject.experts_touched(batch_size)}
    return {
        "avg_latency": statistics.fmean(whole),
        "latencies": whole,
        "percentiles": {str(percent): percentile(whole, percent) for percent in PERCENTS},
        "median_ttft_ms": ttft * 1e3,
        "decode_tokens_per_second": decode,
        "outpace": ours,
    }


def decode_step(
    subject: Subject, batch_size: int, *, input_len: int = 128, output_len: int = 128, iters: int = 3
) -> Figures:
    """Median milliseconds of a decode step with all requests of a batch, and the limit."""
    items = [Item(prompt, output_len) for prompt in _prompts(subject, batch_size, input_len, output_len)]
    subject.warm_up(items)
    steps = [gap for _ in range(iters) for gap in _shared_gaps(run(subject.llm.engine, items).traces)]
    limit = None
    if (cost := subject.cost) is not None:
        limit = cost.decode_seconds(batch_size, input_len + output_len / 2, subject.speed) * 1e3
    return {
        "step_ms": statistics.median(steps) * 1e3,
        "p99_step_ms": percentile(steps, 99) * 1e3,
        "steps": len(steps),
        "limit_ms": limit,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
    }


def first_token(subject: Subject, length: int, *, iters: int = 3) -> Figures:
    """Median milliseconds until the first token of one prompt, and the limit."""
    times, cost = _times(subject, _prompts(subject, 1, length, 1), 1, iters), subject.cost
    limit = None if cost is None else cost.prompt_seconds(1, length, subject.speed) * 1e3
    return {"ttft_ms": statistics.median(times) * 1e3, "times": times, "limit_ms": limit, "input_len": length}


def _prompts(subject: Subject, count: int, input_len: int, output_len: int) -> list[list[int]]:
    prompts = [latency_prompt(subject.vocab_size, input_len, number) for number in range(count)]
    check_lengths([Item(prompts[0], output_len)], subject.llm.engine.max_model_len)
    return prompts


def _shared_gaps(traces: Sequence[Trace]) -> list[float]:
    """Seconds between tokens while all requests decode."""
    begin, end = max(trace.times[0] for trace in traces), min(trace.times[-1] for trace in traces)
    last = max(traces, key=lambda trace: trace.times[0])
    return [later - earlier for earlier, later in pairwise(each for each in last.times if begin <= each <= end)]


def _times(subject: Subject, prompts: list[list[int]], length: int, iters: int) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    times = []
    for _ in range(WARM_UPS + iters):
        begin = time.perf_counter()
        subject.llm.generate(list(prompts), params, use_tqdm=False)
        times.append(time.perf_counter() - begin)
    return times[WARM_UPS:]
