"""Drive an engine step by step and note when each token came."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outpace.bench.workload import Item
from outpace.llm_engine import LLMEngine
from outpace.types import RequestOutput, SamplingParams

Watch = Callable[[int, int], None]
"""Told now and then how many requests of how many have ended."""


@dataclass(slots=True)
class Trace:
    """A request and the times of its tokens, in seconds of a monotonic clock."""

    output: RequestOutput
    times: list[float] = field(default_factory=list)

    @property
    def arrival(self) -> float:
        """When it was handed over."""
        return self.output.metrics.arrival_time

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """Requests that have ended, and the seconds they took together."""

    traces: list[Trace]
    seconds: float


class Driver:
    """Hands requests to an engine and notes when tokens come: greedy, of full length."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_added = 0
        self.live: dict[str, Trace] = {}
        """Requests that have not ended."""

    def add(self, item: Item) -> Trace:
        """Hand over a request."""
        params = SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True)
        name = f"bench-{self._num_added}"
        self._num_added += 1
        trace = self.live[name] = Trace(self._engine.add_request(name, item.prompt, params))
        return trace

    def step(self) -> list[Trace]:
        """Take a step; the requests that have a new token."""
        changed = self._engine.step()
        now = time.perf_counter()
        traces = [self.live[output.request_id] for output in changed]
        for trace in traces:
            trace.times.append(now)
            if trace.output.finished:
                del self.live[trace.output.request_id]
        return traces

    def close(self) -> None:
        """End what has not ended, and let the engine come to rest."""
        for name in self.live:
            self._engine.abort(name)
        self.live.clear()
        while self._engine.has_unfinished_requests:
            self._engine.step()


def run(engine: LLMEngine, items: Sequence[Item], concurrency: int | None = None, watch: Watch | None = None) -> Run:
    """Run requests to their ends: all handed over at once, or so many at a time, each replaced when it ends."""
    driver, todo, traces = Driver(engine), deque(items), []
    most = len(items) if concurrency is None else concurrency
    begin = time.perf_counter()
    try:
        while todo or driver.live:
            while todo and len(driver.live) < most and engine.has_room:
                traces.append(driver.add(todo.popleft()))
            driver.step()
            if watch is not None:
                watch(len(traces) - len(driver.live), len(items))
        seconds = time.perf_counter() - begin
    finally:
        driver.close()
    return Run(traces, seconds)
