"""What Prometheus reads: vLLM's names, and numbers that are those of the engine."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outpace.server.engine import EngineStatus
from outpace.server.metrics import CONTENT_TYPE, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels but the model's, after a reader of the format."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


@pytest.fixture
def status() -> EngineStatus:
    return EngineStatus(ready=True, free_blocks=16, num_blocks=64)


@pytest.fixture
def metrics(status: EngineStatus) -> Metrics:
    return Metrics("tiny", lambda: status)


def test_the_numbers_of_the_engine_are_read_when_they_are_asked_for(metrics: Metrics, status: EngineStatus) -> None:
    assert samples(metrics)["outpace:num_requests_running",] == 0
    status.running, status.waiting, status.restarts = 3, 4, 1
    status.prompt_tokens, status.generated_tokens, status.preemptions = 100, 50, 2
    status.prefix_hits, status.prefix_queries, status.startup_seconds = 16, 100, {"load": 1.5}
    found = samples(metrics)
    assert found["outpace:num_requests_running",] == 3
    assert found["outpace:num_requests_waiting",] == 4
    assert found["outpace:kv_cache_usage_perc",] == 0.75
    assert found["outpace:prompt_tokens_total",] == 100
    assert found["outpace:generation_tokens_total",] == 50
    assert found["outpace:num_preemptions_total",] == 2
    assert found["outpace:prefix_cache_hits_total",] == 16
    assert found["outpace:prefix_cache_queries_total",] == 100
    assert found["outpace:engine_restarts_total",] == 1
    assert found["outpace:engine_ready",] == 1
    assert found["outpace:startup_seconds", "load"] == 1.5


def test_requests_are_counted_by_how_they_ended(metrics: Metrics) -> None:
    metrics.observe_request(10, 5, 0.03, 0.002, 0.04, "stop")
    metrics.observe_request(20, 1, 0.3, None, 0.3, "length")
    metrics.observe_request(20, 0, None, None, 0.1, "abort")
    metrics.observe_rejection("overloaded")
    found = samples(metrics)
    assert found["outpace:request_success_total", "stop"] == 1
    assert found["outpace:request_success_total", "abort"] == 1
    assert found["outpace:admission_rejections_total", "overloaded"] == 1
    assert found["outpace:time_to_first_token_seconds_count",] == 2
    assert found["outpace:time_to_first_token_seconds_bucket", "0.04"] == 1
    assert found["outpace:request_time_per_output_token_seconds_count",] == 1
    assert found["outpace:e2e_request_latency_seconds_sum",] == pytest.approx(0.44)
    assert found["outpace:request_prompt_tokens_sum",] == 50
    assert found["outpace:request_generation_tokens_sum",] == 6


def test_two_servers_in_a_process_do_not_share(metrics: Metrics, status: EngineStatus) -> None:
    other = Metrics("tiny", lambda: status)
    other.observe_request(1, 1, 0.1, None, 0.1, "stop")
    assert samples(other)["outpace:e2e_request_latency_seconds_count",] == 1
    assert ("outpace:e2e_request_latency_seconds_count",) not in samples(metrics)


def test_an_engine_without_blocks_is_not_full() -> None:
    assert samples(Metrics("tiny", EngineStatus))["outpace:kv_cache_usage_perc",] == 0
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
