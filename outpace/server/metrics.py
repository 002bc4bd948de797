"""Prometheus metrics under vLLM's names, with `outpace:` for a prefix. Each server has a registry of its own."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outpace.server.engine import EngineStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


def _used(status: EngineStatus) -> float:
    return 1 - status.free_blocks / status.num_blocks if status.num_blocks else 0.0


_GAUGES: tuple[tuple[str, str, Callable[[EngineStatus], float]], ...] = (
    ("num_requests_running", "Sequences in the steps of the engine.", lambda status: status.running),
    ("num_requests_waiting", "Sequences that wait for the engine.", lambda status: status.waiting),
    ("kv_cache_usage_perc", "Used part of the key-value cache; 1 is all.", _used),
    ("engine_ready", "1 while the engine takes requests.", lambda status: status.ready),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStatus], float]], ...] = (
    ("prompt_tokens", "Tokens of prompts that got an answer.", lambda status: status.prompt_tokens),
    ("generation_tokens", "Tokens of answers.", lambda status: status.generated_tokens),
    ("num_preemptions", "Requests that gave way to others.", lambda status: status.preemptions),
    ("prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda status: status.prefix_queries),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda status: status.prefix_hits),
    ("engine_steps", "Steps of the engine.", lambda status: status.steps),
    ("engine_restarts", "Engine processes that had to be replaced.", lambda status: status.restarts),
)


class _Engine(Collector):
    """The numbers of the engine, read when they are asked for."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self._model, self._status = model, status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"outpace:{name}", text, labels=_LABELS)
            gauge.add_metric([self._model], float(value(status)))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"outpace:{name}", text, labels=_LABELS)
            counter.add_metric([self._model], float(value(status)))
            yield counter
        parts = GaugeMetricFamily("outpace:startup_seconds", "What the last start took.", labels=(*_LABELS, "part"))
        for part, seconds in status.startup_seconds.items():
            parts.add_metric([self._model, part], seconds)
        yield parts

    def describe(self) -> list[Metric]:
        """Nothing beforehand: the names are known, and the engine need not be asked for them."""
        return []


class Metrics:
    """What one server has to tell."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        """`status` is the engine's own function of that name."""
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(model, status))
        self._model = model
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SHORT)
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of a request.", _SHORT
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LONG)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = self._histogram("request_generation_tokens", "Tokens of the answers of a request.", _TOKENS)
        self._success = self._counter("request_success", "Requests by how they ended.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests that were refused.", "reason")

    def observe_request(
        self,
        prompt_tokens: int,
        output_tokens: int,
        ttft: float | None,
        tpot: float | None,
        e2e: float,
        finish_reason: str,
    ) -> None:
        """Count a request that has ended; times are seconds, None where there was no such token."""
        if ttft is not None:
            self._first.labels(self._model).observe(ttft)
        if tpot is not None:
            self._each.labels(self._model).observe(tpot)
        self._whole.labels(self._model).observe(e2e)
        self._prompt.labels(self._model).observe(prompt_tokens)
        self._answer.labels(self._model).observe(output_tokens)
        self._success.labels(self._model, finish_reason).inc()

    def observe_rejection(self, reason: str) -> None:
        """Count a request that was refused: "overloaded", "draining", ..."""
        self._rejected.labels(self._model, reason).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads, as `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"outpace:{name}", text, _LABELS, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"outpace:{name}", text, (*_LABELS, label), registry=self.registry)
