"""Figures of a run, under the names that vLLM's benchmarks use."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.bench.drive import Run

Figures = dict[str, Any]


def throughput_figures(run: Run) -> Figures:
    """Keys of `vllm bench throughput --output-json` and of `vllm bench serve`."""
    traces, seconds = run.traces, run.seconds
    inputs = sum(len(trace.output.prompt_token_ids) for trace in traces)
    outputs = sum(trace.output.num_tokens for trace in traces)
    return {
        "elapsed_time": seconds,
        "num_requests": len(traces),
        "total_num_tokens": inputs + outputs,
        "requests_per_second": len(traces) / seconds,
        "tokens_per_second": (inputs + outputs) / seconds,
        "duration": seconds,
        "completed": sum(trace.output.finished for trace in traces),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(traces) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        **_spread("ttft", [trace.times[0] - trace.arrival for trace in traces]),
        **_spread("tpot", [sum(gaps) / len(gaps) for trace in traces if (gaps := trace.gaps)]),
        **_spread("itl", [gap for trace in traces for gap in trace.gaps]),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """0 where there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def _spread(name: str, seconds: Sequence[float]) -> Figures:
    """Mean, median, deviation and 99th percentile in milliseconds."""
    values = np.asarray(seconds or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }
