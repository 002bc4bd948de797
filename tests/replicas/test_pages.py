"""Numbers of several replicas as those of one server."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outpace.replicas.merge import Numbers, Shown
from tests.replicas.fakes import Behaviour, Got, routed

pytestmark = pytest.mark.anyio
NAME = "model_name"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def text_of(number: int) -> str:
    """What one server tells; numbers grow with it."""
    registry = CollectorRegistry()
    Counter("outpace:prompt_tokens", "P.", [NAME], registry=registry).labels("m").inc(number)
    Counter("outpace:http_requests", "H.", [NAME, "outcome"], registry=registry).labels("m", "done").inc(100)
    histogram = Histogram("outpace:time", "T.", [NAME], buckets=(1, 2), registry=registry)
    histogram.labels("m").observe(number)
    Gauge("outpace:num_requests_running", "R.", [NAME], registry=registry).labels("m").set(number)
    Gauge("outpace:kv_cache_usage_perc", "K.", [NAME], registry=registry).labels("m").set(number / 10)
    return generate_latest(registry).decode()


def values(text: str) -> dict[str, float]:
    """The samples of a text by name and labels, each of which is there once; and each family."""
    found: dict[str, float] = {}
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for name, value in sorted(sample.labels.items()) if name != NAME)
            key = f"{sample.name}{'{' + labels + '}' if labels else ''}"
            assert key not in found
            found[key] = sample.value
    return found


def shown(numbers: Numbers) -> dict[str, float]:
    """All that is known, as it would be written."""
    registry = CollectorRegistry()
    registry.register(Shown(numbers.whole()))
    return values(generate_latest(registry).decode())


def test_totals_and_histograms_are_added_up_and_gauges_by_their_meaning() -> None:
    numbers = Numbers()
    for replica, number in enumerate((1, 2, 3)):
        numbers.take(replica, text_of(number))
    found = shown(numbers)
    assert found["outpace:prompt_tokens_total"] == 6
    assert [found[f"outpace:time_bucket{{{le}}}"] for le in ("1.0", "2.0", "+Inf")] == [1, 2, 3]
    assert (found["outpace:time_sum"], found["outpace:time_count"]) == (6, 3)
    assert found["outpace:num_requests_running"] == 6
    assert found["outpace:kv_cache_usage_perc"] == 0.3
    created = [values(text_of(0))["outpace:prompt_tokens_created"], found["outpace:prompt_tokens_created"]]
    assert created[0] >= created[1] > 10**9, "no sum of times"


def test_totals_never_fall() -> None:
    numbers = Numbers()
    numbers.take(0, text_of(5))
    numbers.take(1, text_of(7))
    numbers.take(1, None)
    found = shown(numbers)
    assert found["outpace:prompt_tokens_total"] == 12
    assert found["outpace:num_requests_running"] == 5, "what runs on one that is not there is not known"
    numbers.retire(1)
    numbers.retire(1)
    assert shown(numbers)["outpace:prompt_tokens_total"] == 12
    numbers.take(1, text_of(2))
    found = shown(numbers)
    assert (found["outpace:prompt_tokens_total"], found["outpace:num_requests_running"]) == (14, 7)


def tells(number: int, status: dict[str, Any] | None = None) -> Behaviour:
    async def answer(got: Got) -> None:
        if got.target == "/metrics":
            body = text_of(number).encode()
            got.head(200, content_type="text/plain", content_length=str(len(body)))
            got.data(body)
            got.end()
        else:
            got.json(status or {"ok": got.headers.get("authorization", "")})

    return answer


async def test_metrics_of_all_replicas_and_of_the_router(tmp_path: Path) -> None:
    async with routed(tmp_path, tells(1), tells(2), tells(4)) as router:
        for _ in range(3):
            await router.ask()
        router.fleet.set_ready(router.fleet.replicas[2], False)
        router.fleet.replicas[2].restarts = 2
        call = await router.get("/metrics")
    assert call.answer_headers["content-type"].startswith("text/plain; version=0.0.4")
    found = values(call.text)
    assert found["outpace:prompt_tokens_total"] == 3
    assert found["outpace:http_requests_total{done}"] == 3, "each request once, however often it was tried"
    assert (found["outpace:replicas"], found["outpace:replicas_ready"]) == (3, 2)
    assert found["outpace:replica_restarts_total{2}"] == 2
    assert found["outpace:retried_requests_total"] == 0
    assert [found[f"outpace:replica_requests_total{{{index}}}"] for index in range(3)] == [1, 1, 1]
    assert found["outpace:replica_requests_running{0}"] == 0


async def test_metrics_need_the_key_and_can_be_turned_off(tmp_path: Path) -> None:
    async with routed(tmp_path, tells(1), api_keys=["secret"]) as router:
        assert (await router.get("/metrics")).status == 401
        call = await router.get("/metrics", headers={"authorization": "Bearer secret"})
        assert call.status == 200
        assert router.fakes[0].got[0].headers["authorization"] == "Bearer secret"
    (tmp_path / "2").mkdir()
    async with routed(tmp_path / "2", tells(1), metrics=False) as router:
        assert "outpace:replicas" not in (await router.get("/metrics")).text, "the replica answers, in truth with 404"


async def test_status_adds_up(tmp_path: Path) -> None:
    one = {"model": "m", "ready": True, "running": 1, "num_blocks": 10, "step_sizes": [1, 2], "levels": {"a": 1}}
    other = {"model": "m", "ready": False, "running": 2, "num_blocks": 10, "step_sizes": [1], "levels": {"a": 2}}
    async with routed(tmp_path, tells(1, one), tells(1, other)) as router:
        found = json.loads((await router.get("/status")).text)
        assert found.pop("replicas") == [{"ready": True, "in_flight": 0, "restarts": 0}] * 2
        assert found == {**one, "running": 3, "num_blocks": 20, "step_sizes": [2, 2], "levels": {"a": 3}}
        for replica in router.fleet.replicas:
            router.fleet.set_ready(replica, False)
        assert (await router.get("/status")).status == 503


async def test_experts_of_all_replicas(tmp_path: Path) -> None:
    load = {"layers": [3], "tokens": [[1, 3]], "imbalance": [1.5]}
    async with routed(tmp_path, tells(1, load), tells(1, load)) as router:
        found = json.loads((await router.get("/status/experts")).text)
    assert found == {"layers": [3], "tokens": [[2, 6]], "imbalance": [1.5]}
