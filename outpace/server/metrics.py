"""Prometheus metrics under vLLM's names, with the prefix `outpace:`. Each server has its own registry."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outpace.server.engine import STEP_SIZES, EngineStatus
from outpace.server.observe import Ended

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_FEW = (1, 2, 5, 10, 20)
_PLACES = ("device", "host", "file")
_Key = TypeVar("_Key", bound=tuple[str, ...])
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


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
    ("num_preemptions", "Requests that were preempted by others.", lambda status: status.preemptions),
    ("prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda status: status.prefix_queries),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda status: status.prefix_hits),
    ("engine_steps", "Steps of the engine.", lambda status: status.steps),
    ("engine_restarts", "Engine processes that had to be replaced.", lambda status: status.restarts),
)


_LEVELS: tuple[tuple[str, str, str, bool, str, tuple[str, ...]], ...] = (
    ("prefix_cache_level_queries", "Tokens looked for on a level.", "level", True, "_queries", _PLACES),
    ("prefix_cache_level_hits", "Tokens found on a level.", "level", True, "_hits", _PLACES),
    ("kv_offload_bytes", "Bytes copied between levels.", "way", True, "_bytes", ("store", "load", "write", "read")),
    ("kv_offload_blocks", "Blocks of a level.", "level", False, "_blocks", _PLACES[1:]),
    ("kv_offload_used_blocks", "Blocks of a level that hold something.", "level", False, "_used", _PLACES[1:]),
)
"""Name, text, label, whether it is a counter, ending of the names in `EngineStatus.levels`, values of the label."""


_OF_REQUESTS: tuple[tuple[str, str, tuple[float, ...], str], ...] = (
    ("time_to_first_token_seconds", "Arrival to first token.", _SHORT, "ttft"),
    ("request_time_per_output_token_seconds", "Mean time between tokens of a request.", _SHORT, "tpot"),
    ("e2e_request_latency_seconds", "Arrival to last token.", _LONG, "e2e"),
    ("request_queue_time_seconds", "Time in the engine's queue.", _LONG, "queue"),
    ("request_prefill_time_seconds", "End of the queue to first token.", _LONG, "prefill"),
    ("request_decode_time_seconds", "First token to last token.", _LONG, "decode"),
    ("request_inference_time_seconds", "End of the queue to last token.", _LONG, "inference"),
    ("request_params_n", "Answers that were asked for.", _FEW, "n"),
    ("request_params_max_tokens", "Tokens that an answer could have.", _TOKENS, "max_tokens"),
    ("request_max_num_generation_tokens", "Tokens of the longest answer of a request.", _TOKENS, "longest"),
    ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS, "prompt_tokens"),
    ("request_generation_tokens", "Tokens of the answers of a request.", _TOKENS, "output_tokens"),
)
"""Histograms of requests: name, text, buckets, field of `Ended`. Requests where the field is None are not counted."""


class _Engine(Collector):
    """The numbers of the engine, read at each scrape."""

    def __init__(self, model: str, status: Callable[[], EngineStatus], *, experts: bool) -> None:
        self._model, self._status, self._experts = model, status, experts

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, text, value in _GAUGES:
            yield self._family(GaugeMetricFamily, name, text, {(): value(status)})
        for name, text, value in _COUNTERS:
            yield self._family(CounterMetricFamily, name, text, {(): value(status)})
        text = "Sequences that wait, by reason: for capacity; deferred, as in vLLM, is always 0 here."
        waiting = {("capacity",): status.waiting, ("deferred",): 0}
        yield self._family(GaugeMetricFamily, "num_requests_waiting_by_reason", text, waiting, "reason")
        parts = {(part,): seconds for part, seconds in status.startup_seconds.items()}
        text = "Seconds of each part of the last start."
        yield self._family(GaugeMetricFamily, "startup_seconds", text, parts, "part")
        about = {tuple(status.cache_config.values()): 1}
        yield self._family(
            GaugeMetricFamily, "cache_config_info", "Options of the key-value cache.", about, *status.cache_config
        )
        counts = status.step_sizes or [0] * (len(STEP_SIZES) + 1)
        yield _histogram(
            "iteration_tokens_total", "Tokens of a step.", self._model, STEP_SIZES, counts, status.step_tokens
        )
        if status.levels:
            yield from self._of_levels(status.levels)
        if status.expert_layers:
            yield from self._of_experts(status)

    def _family(self, kind: _Kind, name: str, text: str, values: Mapping[_Key, float], *labels: str) -> Metric:
        """A metric with a value for each combination of labels."""
        family = kind(f"outpace:{name}", text, labels=(*_LABELS, *labels))
        for key, value in values.items():
            family.add_metric([self._model, *key], float(value))
        return family

    def _of_levels(self, levels: Mapping[str, int]) -> Iterator[Metric]:
        """Levels of the prefix cache below the device's pages."""
        for name, text, label, counts, ending, values in _LEVELS:
            found = {(value,): levels.get(f"{value}{ending}", 0) for value in values}
            yield self._family(CounterMetricFamily if counts else GaugeMetricFamily, name, text, found, label)
        text, loading = "Blocks that are being loaded.", {(): levels["loading"]}
        yield self._family(GaugeMetricFamily, "kv_offload_loading_blocks", text, loading)
        text, failed = "Blocks of files that could not be read or written.", {(): levels["failed"]}
        yield self._family(CounterMetricFamily, "kv_offload_failed_blocks", text, failed)

    def _of_experts(self, status: EngineStatus) -> Iterator[Metric]:
        """How evenly tokens go to experts. Counts of each expert only if asked for: there may be thousands."""
        loads = [(str(layer), load) for layer, load in zip(status.expert_layers, status.expert_load, strict=False)]
        ratios = {(layer,): ratio for layer, load in loads if (ratio := imbalance(load))}
        text = "Tokens of the busiest expert of a layer, as a multiple of the mean of its experts."
        yield self._family(GaugeMetricFamily, "expert_imbalance", text, ratios, "layer")
        if self._experts:
            each = {(layer, str(number)): tokens for layer, load in loads for number, tokens in enumerate(load)}
            text = "Tokens that went to an expert."
            yield self._family(CounterMetricFamily, "expert_tokens", text, each, "layer", "expert")

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not ask the engine."""
        return []


def imbalance(load: Sequence[int]) -> float | None:
    """Tokens of the busiest expert over their mean; None: there are no tokens."""
    total = sum(load)
    return max(load) * len(load) / total if total else None


def _histogram(
    name: str, text: str, model: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """A histogram from counts: how many values are in each bucket, and how many above the last bound."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family = HistogramMetricFamily(f"outpace:{name}", text, labels=_LABELS)
    family.add_metric([model], list(zip(names, accumulate(counts), strict=True)), total)
    return family


class _Gaps(Collector):
    """Time between tokens. Observed for each token, for which the library's own histogram is too slow."""

    def __init__(self, model: str) -> None:
        self._model, self._counts, self._total = model, [0] * (len(_GAPS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_GAPS, seconds)] += 1
        self._total += seconds

    def collect(self) -> Iterator[Metric]:
        text = "Time between two pieces of an answer, most of which are one token."
        yield _histogram("inter_token_latency_seconds", text, self._model, _GAPS, self._counts, self._total)


class Metrics:
    """The metrics of one server."""

    def __init__(self, model: str, status: Callable[[], EngineStatus], *, experts: bool = False) -> None:
        """status: returns that of the engine. experts: add a series for each expert of each layer."""
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(model, status, experts=experts))
        self._gaps = _Gaps(model)
        self.registry.register(self._gaps)
        self.observe_gap = self._gaps.add
        self._model = model
        self._histograms = [
            (Histogram(f"outpace:{name}", text, _LABELS, buckets=buckets, registry=self.registry), field)
            for name, text, buckets, field in _OF_REQUESTS
        ]
        self._success = self._counter("request_success", "Requests by how they ended.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests that were refused.", "reason")
        self._outcomes = self._counter("http_requests", "POST requests by outcome; each is in one.", "outcome")

    def observe_request(self, ended: Ended) -> None:
        """Count a request that has ended."""
        for histogram, field in self._histograms:
            if (value := getattr(ended, field)) is not None:
                histogram.labels(self._model).observe(value)
        self._success.labels(self._model, ended.finish_reason).inc()

    def observe_rejection(self, reason: str) -> None:
        """Count a request that was refused: "overloaded", "draining", ..."""
        self._rejected.labels(self._model, reason).inc()

    def observe_outcome(self, outcome: str) -> None:
        """Count an HTTP request that has ended: "done", "rejected", "cancelled", "failed" or "invalid"."""
        self._outcomes.labels(self._model, outcome).inc()

    def render(self) -> bytes:
        """All metrics as text of `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"outpace:{name}", text, (*_LABELS, label), registry=self.registry)
