"""What stands around a stream: spans for a collector, pings while nothing comes, and which hosts are answered."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import PreTrainedTokenizerFast

from outpace.errors import EngineDead
from outpace.server import tracing
from outpace.server.app import create_app
from outpace.server.exit_codes import WRONG_OPTION
from outpace.server.launch import launch
from outpace.server.observe import Ended
from outpace.server.options import ServerConfig
from outpace.types import SamplingParams
from tests.patience import PATIENCE
from tests.server.asgi import Call
from tests.server.conftest import Serve, Served
from tests.server.fake import FakeEngine, says

pytestmark = pytest.mark.anyio
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(tokenizer: PreTrainedTokenizerFast, spans: InMemorySpanExporter) -> Iterator[Served]:
    """A server whose spans are kept."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    engine = FakeEngine(tokenizer, says("abc"))
    app = create_app(engine, ServerConfig(), tokenizer, traces=provider)
    yield Served(app, engine)
    app.state.services.close()
    provider.shutdown()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_under_its_callers(traced: Served, spans: InMemorySpanExporter, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stream": stream}
    answer = await traced.post("/v1/completions", body, headers={"traceparent": PARENT, "x-request-id": "mine"})
    assert answer.status_code == 200
    (span,) = spans.get_finished_spans()
    found: dict[str, Any] = dict(span.attributes or {})
    assert span.name == "llm_request"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    assert span.status.is_ok or span.status.is_unset
    expected: dict[str, Any] = {
        "gen_ai.response.model": "fake",
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.num_sequences": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time >= 1e9 * found["gen_ai.latency.e2e"]


async def test_failed_requests_are_marked_and_others_make_no_span(traced: Served, spans: InMemorySpanExporter) -> None:
    await traced.get("/v1/models")
    await traced.post("/v1/completions", {"prompt": "a", "nonsense": 1})
    assert spans.get_finished_spans() == ()
    traced.engine.error = EngineDead("gone")
    assert (await traced.post("/v1/completions", {"prompt": "a"})).status_code == 503
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert not span.status.is_ok
    assert not span.status.is_unset


def test_what_the_engine_tells_is_in_the_span() -> None:
    ended = Ended(3, 2, 2, "stop", 1.0, 0.5, queue=0.125, prefill=0.25, decode=0.5, params=SamplingParams(n=2))
    found = tracing.attributes(ended, "tiny", "r")
    assert found["gen_ai.latency.time_in_queue"] == 0.125
    assert found["gen_ai.latency.time_in_model_prefill"] == 0.25
    assert found["gen_ai.latency.time_in_model_decode"] == 0.5
    assert found["gen_ai.latency.time_in_model_inference"] == 0.75
    assert "gen_ai.latency.time_in_queue" not in tracing.attributes(Ended(3), "tiny", "r")


def test_a_wrong_endpoint_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(None, {}, ServerConfig(port=0, otlp_traces_endpoint="collector:4317")) == WRONG_OPTION
    assert capsys.readouterr().err.startswith("error: otlp_traces_endpoint: expected a URL")


def test_without_the_extra_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outpace.server.checks.PACKAGES", ("no_such_package.trace",))
    asked = ServerConfig(port=0, otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    assert launch(None, {}, asked) == WRONG_OPTION
    assert "pip install 'outpace[tracing]'" in capsys.readouterr().err


@pytest.mark.slow
def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = "import sys, outpace.server.app, outpace.server.lifetime; print('opentelemetry.sdk' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip() == "False"


async def test_a_provider_sends_to_the_endpoint() -> None:
    provider = tracing.make_provider("http://127.0.0.1:9/v1/traces")
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "outpace"
    provider.shutdown()
    assert tracing.make_provider(None) is None


# Pings


async def _until(call: Call, text: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while text not in call.text:
            call.changed.clear()
            await call.changed.wait()


async def test_a_stream_that_waits_is_kept_alive(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, says("abc"), hold=asyncio.Event())
    assert engine.hold is not None
    call = Call(serve(engine, sse_ping_seconds=0.01).app, "/v1/completions", {"prompt": "a", "stream": True})
    running = asyncio.create_task(call.run())
    await _until(call, ": ping\n\n: ping\n\n")
    assert call.status == 200
    engine.hold.set()
    await running
    events = [line for line in call.text.split("\n\n") if line.startswith("data:")]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data:")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert sum(message["type"] == "http.response.start" for message in call.sent) == 1


async def test_what_fails_after_a_ping_is_the_last_event(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, error=EngineDead("gone"), hold=asyncio.Event())
    assert engine.hold is not None
    call = Call(serve(engine, sse_ping_seconds=0.01).app, "/v1/completions", {"prompt": "a", "stream": True})
    running = asyncio.create_task(call.run())
    await _until(call, ": ping")
    engine.hold.set()
    await running
    assert '"code":"engine_failed"' in call.text
    assert call.text.endswith("data: [DONE]\n\n")


async def test_a_quick_stream_has_no_ping_and_zero_sends_none(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    assert ": ping" not in (await serve().post("/v1/completions", {"prompt": "a", "stream": True})).text
    engine = FakeEngine(tokenizer, error=EngineDead("gone"), hold=asyncio.Event())
    assert engine.hold is not None
    call = Call(serve(engine, sse_ping_seconds=0).app, "/v1/completions", {"prompt": "a", "stream": True})
    running = asyncio.create_task(call.run())
    await engine.waits.wait()
    engine.hold.set()
    await running
    assert call.status == 503, "what fails before the first event keeps its status"


# Hosts and paths


async def test_health_needs_no_key_under_a_root_path(serve: Serve) -> None:
    transport = httpx2.ASGITransport(serve(api_keys=["k"]).app, root_path="/api")  # as uvicorn calls it with the option
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.get("/api/health/ready")).status_code == 200
        assert (await client.get("/api/v1/models")).status_code == 401
        assert (await client.get("/api/v1/models", headers={"authorization": "Bearer k"})).status_code == 200
        assert (await client.get("/api/")).headers["www-authenticate"].startswith("Basic ")


async def test_nothing_but_the_page_may_be_kept(serve: Serve) -> None:
    server = serve()
    for path in ("/v1/models", "/status", "/health/live", "/no/such/path"):
        assert (await server.get(path)).headers["cache-control"] == "no-store"
    assert (await server.get("/")).headers.get_list("cache-control") == ["no-cache"]
    stream = await server.post("/v1/completions", {"prompt": "a", "stream": True})
    assert stream.headers.get_list("cache-control") == ["no-cache"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"127.0.0.1", "localhost", "::1"}),
        ({"host": "127.0.0.5"}, {"127.0.0.5", "127.0.0.1", "localhost", "::1"}),
        ({"host": "0.0.0.0"}, set()),
        ({"host": "0.0.0.0", "allowed_hosts": "api.example.com"}, {"api.example.com"}),
        ({"allowed_hosts": ["*"]}, set()),
        ({"allowed_hosts": "api.example.com"}, {"127.0.0.1", "localhost", "::1", "api.example.com"}),
    ],
)
def test_names_that_are_answered(options: dict[str, Any], expected: set[str]) -> None:
    assert set(ServerConfig(**options).hosts()) == expected


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("[::1]:8000", 200),
        ("other", 200),
        ("[fe80::1]:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example:8000", 421),
        ("", 421),
    ],
)
async def test_other_names_are_refused(serve: Serve, host: str, status: int) -> None:
    server = serve(allowed_hosts=ServerConfig(allowed_hosts=["Other:80", "[fe80::1]"]).hosts())
    assert (await server.get("/v1/models", headers={"host": host})).status_code == status
    assert (await server.get("/health/ready", headers={"host": host})).status_code == 200
