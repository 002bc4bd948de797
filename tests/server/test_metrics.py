"""What Prometheus reads: vLLM's names, and numbers that are those of the engine."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerFast

from outpace.errors import EngineDead
from outpace.server import client as client_module
from outpace.server.async_tokenizer import AsyncTokenizer
from outpace.server.engine import STEP_SIZES, Delta, EngineRequest, EngineStatus
from outpace.server.metrics import CONTENT_TYPE, Metrics
from outpace.server.observe import Ended, observed
from outpace.server.stream import deltas_of_request
from outpace.types import FinishReason, SamplingParams
from tests.models import tiny
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine
from tests.server.test_worker import engine, until


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
    whole = Ended(10, 5, 3, "stop", e2e=0.04, ttft=0.03, tpot=0.002, queue=0.01, prefill=0.02, decode=0.25)
    metrics.observe_request(replace(whole, params=SamplingParams(n=2, max_tokens=64)))
    metrics.observe_request(Ended(20, 1, 1, "length", e2e=0.3, ttft=0.3))
    metrics.observe_request(Ended(20, e2e=0.1))
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
    assert found["outpace:request_max_num_generation_tokens_sum",] == 4
    assert found["outpace:request_params_n_sum",] == 2
    assert found["outpace:request_params_max_tokens_sum",] == 64
    assert found["outpace:request_queue_time_seconds_sum",] == 0.01
    assert found["outpace:request_prefill_time_seconds_sum",] == 0.02
    assert found["outpace:request_decode_time_seconds_sum",] == 0.25
    assert found["outpace:request_inference_time_seconds_sum",] == 0.27
    assert found["outpace:request_inference_time_seconds_count",] == 1


def test_gaps_and_steps_are_histograms(metrics: Metrics, status: EngineStatus) -> None:
    for gap in (0.0001, 0.001, 0.002, 100.0):
        metrics.observe_gap(gap)
    status.step_sizes, status.step_tokens = [2, 1, *[0] * (len(STEP_SIZES) - 2), 4], 90_000
    found = samples(metrics)
    name = "outpace:inter_token_latency_seconds"
    assert [found[f"{name}_bucket", bound] for bound in ("0.001", "0.0025", "2.5", "+Inf")] == [2, 3, 3, 4]
    assert found[f"{name}_count",] == 4
    assert found[f"{name}_sum",] == pytest.approx(100.0031)
    name = "outpace:iteration_tokens_total"
    assert [found[f"{name}_bucket", bound] for bound in ("1.0", "8.0", "16384.0", "+Inf")] == [2, 3, 3, 7]
    assert (found[f"{name}_count",], found[f"{name}_sum",]) == (7, 90_000)


def test_the_levels_of_the_prefix_cache(metrics: Metrics, status: EngineStatus) -> None:
    assert not [name for name in samples(metrics) if "level" in name[0] or "offload" in name[0]]
    status.levels = {"host_blocks": 40, "host_used": 30, "loading": 2, "failed": 1}
    status.levels |= {"device_hits": 5, "host_hits": 6, "host_queries": 9, "load_bytes": 4096}
    found = samples(metrics)
    assert [found["outpace:prefix_cache_level_hits_total", level] for level in ("device", "host", "file")] == [5, 6, 0]
    assert found["outpace:prefix_cache_level_queries_total", "host"] == 9
    assert found["outpace:kv_offload_bytes_total", "load"] == 4096
    assert (found["outpace:kv_offload_blocks", "host"], found["outpace:kv_offload_used_blocks", "host"]) == (40, 30)
    assert (found["outpace:kv_offload_loading_blocks",], found["outpace:kv_offload_failed_blocks_total",]) == (2, 1)


def test_how_the_cache_was_made_is_told_in_labels(metrics: Metrics, status: EngineStatus) -> None:
    status.cache_config = {"block_size": "64", "num_gpu_blocks": "512"}
    assert samples(metrics)["outpace:cache_config_info", "64", "512"] == 1


def test_how_evenly_experts_are_used_is_told_and_each_of_them_if_asked_for(status: EngineStatus) -> None:
    few, all_of_them = Metrics("tiny", lambda: status), Metrics("tiny", lambda: status, experts=True)
    assert not [name for name in samples(all_of_them) if "expert" in name[0]], "a model without experts"
    status.expert_layers = [1, 2, 3]
    assert not [name for name in samples(all_of_them) if "expert" in name[0]], "not counted yet"
    status.expert_load = [[10, 30, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0]]
    found = {name: value for name, value in samples(few).items() if "expert" in name[0]}
    assert found == {("outpace:expert_imbalance", "1"): 3.0, ("outpace:expert_imbalance", "2"): 1.0}
    found = samples(all_of_them)
    assert found["outpace:expert_imbalance", "1"] == 3.0
    by_expert = [found["outpace:expert_tokens_total", str(expert), "1"] for expert in range(4)]  # labels come sorted
    assert by_expert == [10, 30, 0, 0]
    assert sum(name[0] == "outpace:expert_tokens_total" for name in found) == 12


def test_two_servers_in_a_process_do_not_share(metrics: Metrics, status: EngineStatus) -> None:
    other = Metrics("tiny", lambda: status)
    other.observe_request(Ended(1, 1, 1, "stop", e2e=0.1))
    other.observe_gap(0.5)
    assert samples(other)["outpace:e2e_request_latency_seconds_count",] == 1
    assert ("outpace:e2e_request_latency_seconds_count",) not in samples(metrics)
    assert samples(metrics)["outpace:inter_token_latency_seconds_count",] == 0


def test_an_engine_without_blocks_is_not_full() -> None:
    assert samples(Metrics("tiny", EngineStatus))["outpace:kv_cache_usage_perc",] == 0
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


# Through the server


class Notes:
    """Who is told of requests."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.ended: list[Ended] = []

    def observe_request(self, ended: Ended) -> None:
        self.ended.append(ended)

    def observe_gap(self, seconds: float) -> None:
        self.gaps.append(seconds)


def asked_for(**params: Any) -> EngineRequest:
    return EngineRequest(prompt_token_ids=[5] * 7, params=SamplingParams(**params))


def test_deltas_become_numbers() -> None:
    notes, asked = Notes(), asked_for(n=2)
    with observed([asked], notes) as count:
        count(Delta(0, [1], times=(0.5, 0.25)))
        for index, ids, reason in ((1, [1, 2], None), (0, [2], None), (1, [3], None), (0, [], FinishReason.STOP)):
            count(Delta(index, ids, finish_reason=reason))
    (ended,) = notes.ended
    assert len(notes.gaps) == 3, "gaps are those of each answer, without its first piece"
    assert (ended.prompt_tokens, ended.output_tokens, ended.longest, ended.finish_reason) == (7, 5, 3, "stop")
    assert (ended.queue, ended.prefill, ended.params) == (0.5, 0.25, asked.params)
    assert ended.ttft is not None
    assert ended.decode is not None
    assert 0 <= ended.ttft <= ended.ttft + ended.decode <= ended.e2e


@pytest.mark.anyio
async def test_requests_that_fail_or_are_left_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    notes = Notes()

    def ask(engine: FakeEngine) -> AsyncGenerator[Delta, None]:
        return deltas_of_request(engine, [asked_for()], AsyncTokenizer(tokenizer), "r", notes)

    with pytest.raises(EngineDead):
        _ = [each async for each in ask(FakeEngine(tokenizer, error=EngineDead("gone")))]
    left = ask(FakeEngine(tokenizer))
    await anext(left)
    await left.aclose()
    failed, aborted = notes.ended
    assert (failed.finish_reason, failed.ttft, failed.params) == ("error", None, None)
    assert (aborted.finish_reason, aborted.output_tokens) == ("abort", 1)


@pytest.mark.anyio
async def test_the_engine_tells_times_and_ends_one_answer_alone(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    async with engine(tmp_path) as client:
        params = SamplingParams(n=2, max_tokens=50, temperature=0.0, ignore_eos=True)
        asked = EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7], params=params)
        counts, reasons, times = [0, 0], [], []
        async for delta in client.generate(asked):
            counts[delta.index] += len(delta.token_ids)
            times += [delta.times] if delta.times else []
            reasons += [(delta.index, delta.finish_reason)] if delta.finish_reason else []
            asked.unwanted.add(1)
        await until(lambda: client.in_flight == 0)
        ((queue, prefill),) = times
        assert 0 <= queue < 60
        assert 0 < prefill < 60
        assert counts[0] == 50
        assert reasons == [(0, FinishReason.LENGTH)], "the other was ended, and nobody was told"
        await until(lambda: client.status().running == 0)
        status = client.status()
        assert status.generated_tokens < 100, "the answer that nobody wanted went on to its end"
        assert status.free_blocks == status.num_blocks
        assert sum(status.step_sizes) == status.steps
        assert status.cache_config["block_size"] == "16"
        again = EngineRequest(request_id="r", prompt_token_ids=[5], params=replace(params, n=1, max_tokens=3))
        assert sum([len(delta.token_ids) async for delta in client.generate(again)]) == 3


@pytest.mark.anyio
async def test_the_engine_counts_the_tokens_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "COUNT_EVERY", 0.0)
    tiny("mixtral").save_pretrained(tmp_path)
    async with engine(tmp_path) as client:
        assert client.status().expert_layers == [0, 1]
        await until(lambda: bool(client.status().expert_load))
        assert client.status().expert_load == [[0] * 4] * 2, "what the start ran was padding"
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        asked = EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7], params=params)
        assert sum([len(delta.token_ids) async for delta in client.generate(asked)]) == 6
        await until(lambda: sum(client.status().expert_load[1]) == 2 * (3 + 5))
        assert sum(client.status().expert_load[0]) == 2 * (3 + 5)


@pytest.mark.anyio
async def test_the_load_of_experts_over_http(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(expert_metrics=True)
    dense = (await server.get("/status/experts")).json()
    assert dense == {"layers": [], "tokens": [], "imbalance": []}
    now = replace(server.engine.status(), expert_layers=[1, 2], expert_load=[[3, 1], [0, 0]])
    monkeypatch.setattr(server.engine, "status", lambda: now)
    found = (await server.get("/status/experts")).json()
    assert found == {"layers": [1, 2], "tokens": [[3, 1], [0, 0]], "imbalance": [1.5, None]}
    status = (await server.get("/status")).json()
    assert status["expert_layers"] == [1, 2]
    assert "expert_load" not in status


@pytest.mark.anyio
async def test_each_expert_is_in_the_metrics_if_told_so(tokenizer: PreTrainedTokenizerFast, serve: Serve) -> None:
    class WithExperts(FakeEngine):
        def status(self) -> EngineStatus:
            return replace(super().status(), expert_layers=[1], expert_load=[[3, 1]])

    for told, name in ((True, "expert_tokens_total"), (False, "expert_imbalance")):
        text = (await serve(WithExperts(tokenizer), expert_metrics=told).get("/metrics")).text
        assert f"outpace:{name}{{" in text
        assert ("outpace:expert_tokens_total{" in text) == told


@pytest.mark.anyio
async def test_a_stop_string_ends_its_answer_in_the_engine(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve(FakeEngine(tokenizer, lambda request, index: "abXcdef" if index else "abcdefgh"))
    answer = (await server.post("/v1/completions", {"prompt": "a", "n": 2, "stop": ["X"]})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abcdefgh", "ab"]
    assert server.engine.requests[0].unwanted == {1}
