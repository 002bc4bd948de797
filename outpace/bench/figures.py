"""Times at which tokens came, and figures made of them, with the names of vLLM's benchmarks. Imports no torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

Figures = dict[str, Any]
WHOLE, SPLIT = "whole prompts", "SplitFuse"
"""The two runs that `outpace bench throughput --splitfuse` compares."""
FASTGEN_PROMPT = 512.0
"""Prompt tokens per second in DeepSpeed-FastGen's service level agreement."""


@dataclass(slots=True)
class Trace:
    """One request: when it was sent and when its tokens came, in seconds of a monotonic clock."""

    start: float
    prompt_tokens: int
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each token came; from a server, when each event with text came."""
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None: there is only one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


AnyTrace = TypeVar("AnyTrace", bound=Trace)
Level = TypeVar("Level", int, float)


@dataclass(frozen=True)
class Run(Generic[AnyTrace]):
    """Requests that have ended, and the seconds they took together."""

    traces: list[AnyTrace]
    seconds: float


def figures_of(traces: Sequence[Trace], seconds: float, percents: Sequence[int] = (99,)) -> Figures:
    """Keys that `vllm bench throughput` and `vllm bench serve` share, of requests without errors."""
    inputs, outputs = sum(trace.prompt_tokens for trace in traces), sum(trace.output_tokens for trace in traces)
    return {
        "duration": seconds,
        "completed": len(traces),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(traces) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        **spread("ttft", [trace.ttft for trace in traces], percents),
        **spread("tpot", [trace.tpot for trace in traces if trace.tpot is not None], percents),
        **spread("itl", [gap for trace in traces for gap in trace.gaps], percents),
    }


def spread(name: str, seconds: Sequence[float], percents: Sequence[int] = (99,)) -> Figures:
    """Mean, median, standard deviation and percentiles in milliseconds."""
    values = np.asarray(seconds or [0.0]) * 1e3
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{percent}": np.percentile(values, percent) for percent in percents}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile; 0 without values."""
    return float(np.percentile(values, percent)) if values else 0.0


def sweep(
    levels: Iterable[Level], measure: Callable[[Level], Figures], unit: str, say: Callable[[str], None]
) -> Iterator[Figures]:
    """Measure each level, and report each result as it comes."""
    for level in levels:
        found = measure(level)
        say(f"{level:g} {unit}: {found['output_throughput']:,.0f} output tokens/s")
        yield found
