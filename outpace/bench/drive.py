"""Drive an engine step by step and note when each token came."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.bench.figures import Run, Trace
from outpace.bench.workload import Item
from outpace.llm_engine import LLMEngine
from outpace.types import RequestOutput, SamplingParams


@dataclass(slots=True, kw_only=True)
class EngineTrace(Trace):
    """A request of an engine in this process."""

    output: RequestOutput


class Driver:
    """Adds requests to an engine and notes when tokens come. Decoding is greedy, and end tokens are ignored."""

    def __init__(self, engine: LLMEngine, *, streamed: bool = True) -> None:
        """streamed: a client reads each token as it comes, so the time between tokens matters."""
        self._engine = engine
        self._streamed = streamed
        self._num_added = 0
        self.live: dict[str, EngineTrace] = {}
        """Requests that have not ended."""

    def add(self, item: Item) -> EngineTrace:
        """Add a request."""
        params = SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True)
        name = f"bench-{self._num_added}"
        self._num_added += 1
        output = self._engine.add_request(name, item.prompt, params, streamed=self._streamed)
        trace = self.live[name] = EngineTrace(output.metrics.arrival_time, len(item.prompt), output=output)
        return trace

    def step(self) -> list[EngineTrace]:
        """Run a step; returns the requests that got a token."""
        changed = self._engine.step()
        now = time.perf_counter()
        traces = [self.live[output.request_id] for output in changed]
        for trace in traces:
            trace.times.append(now)
            if trace.output.finished:
                trace.end, trace.output_tokens = now, trace.output.num_tokens
                del self.live[trace.output.request_id]
        return traces

    def close(self) -> None:
        """Abort the live requests, and run the engine until it is idle."""
        for name in self.live:
            self._engine.abort(name)
        self.live.clear()
        while self._engine.has_unfinished_requests:
            self._engine.step()


def run(
    engine: LLMEngine,
    items: Sequence[Item],
    concurrency: int | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Run[EngineTrace]:
    """Run requests to their ends: all at once, or at most `concurrency` in flight, each replaced when it ends.

    All at once is offline work, as in `LLM.generate`; with a concurrency, requests are streamed.
    """
    driver, todo, traces = Driver(engine, streamed=concurrency is not None), deque(items), []
    most = len(items) if concurrency is None else concurrency
    begin = time.perf_counter()
    try:
        while todo or driver.live:
            while todo and len(driver.live) < most and engine.has_room:
                traces.append(driver.add(todo.popleft()))
            driver.step()
            after_step()
        seconds = time.perf_counter() - begin
    finally:
        driver.close()
    return Run(traces, seconds)
