"""Latency: one request, or a few together, with nothing beside them."""

import statistics
import time

from outpace.bench.figures import Figures, percentile
from outpace.bench.subject import Subject
from outpace.bench.workload import Item, check_lengths, latency_prompt
from outpace.errors import InputError
from outpace.types import SamplingParams

WARM_UPS = 2
COUNTED = 32  # tokens of each request after which the experts that a step touches are known
PERCENTS = (10, 25, 50, 75, 90, 99)


def latency(
    subject: Subject, *, batch_size: int = 1, input_len: int = 128, output_len: int = 256, iters: int = 3
) -> Figures:
    """Time to the first token and tokens/s after it, through `LLM.generate`, as the median of `iters`.

    Decode tokens/s = (output_len - 1) / (time for output_len tokens - time for 1 token), for each request of the batch.
    """
    named = {"batch-size": batch_size, "input-len": input_len, "output-len": output_len - 1, "iters": iters}
    for name, value in named.items():
        if value < 1:
            raise InputError(f"{name}: must be at least {2 if name == 'output-len' else 1}")
    prompts = [latency_prompt(subject.vocab_size, input_len, number) for number in range(batch_size)]
    check_lengths([Item(prompts[0], output_len)], subject.llm.engine.max_model_len)
    if subject.llm.engine.experts is not None:  # which experts are touched is counted
        subject.warm_up([Item(prompt, min(output_len, COUNTED)) for prompt in prompts])
    whole, first = (_times(subject, prompts, length, iters) for length in (output_len, 1))
    decode = (output_len - 1) / (statistics.median(whole) - statistics.median(first))
    return {
        "avg_latency": statistics.fmean(whole),
        "latencies": whole,
        "percentiles": {str(percent): percentile(whole, percent) for percent in PERCENTS},
        "median_ttft_ms": statistics.median(first) * 1e3,
        "decode_tokens_per_second": decode,
        "outpace": {**subject.facts(), **_limits(subject, batch_size, input_len, output_len, decode, first)},
    }


def _times(subject: Subject, prompts: list[list[int]], length: int, iters: int) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    times = []
    for _ in range(WARM_UPS + iters):
        begin = time.perf_counter()
        subject.llm.generate(list(prompts), params, use_tqdm=False)
        times.append(time.perf_counter() - begin)
    return times[WARM_UPS:]


def _limits(
    subject: Subject, batch: int, input_len: int, output_len: int, decode: float, first: list[float]
) -> Figures:
    options = {"batch_size": batch, "input_len": input_len, "output_len": output_len}
    if (cost := subject.cost) is None:
        return {**options, "limit": None, "ratio": None, "ratio_ttft": None}
    step = cost.decode_seconds(batch, input_len + output_len / 2, subject.speed)
    prompt = cost.prompt_seconds(batch, input_len, subject.speed)
    return {
        **options,
        "limit": {"decode_tokens_per_second": 1 / step, "ttft_ms": prompt * 1e3},
        "ratio": decode * step,
        "ratio_ttft": prompt / statistics.median(first),
        "experts_touched": cost.touched(batch),
        "experts_counted": bool(subject.touches),
    }
