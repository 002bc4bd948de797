"""OpenTelemetry: one span for each request that generates, with vLLM's attribute names. Needs `outpace[tracing]`."""

import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.server.observe import WATCHED, Ended

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN = "llm_request"


def make_provider(endpoint: str | None) -> "TracerProvider | None":
    """Sends spans to the endpoint from its own thread; None without an endpoint. `shutdown()` sends those that wait."""
    if endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "outpace"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracing:
    """ASGI middleware: a span for each request that reaches the engine, under the caller's `traceparent`."""

    def __init__(self, app: ASGIApp, *, provider: "TracerProvider", model: str) -> None:
        self._app, self._model = app, model
        self._tracer = provider.get_tracer("outpace")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and record its spans."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        begin, watched = time.time_ns(), list[Ended]()
        token = WATCHED.set(watched)
        try:
            await self._app(scope, receive, send)
        finally:
            WATCHED.reset(token)
            for ended in watched:
                self._record(scope, ended, begin)

    def _record(self, scope: Scope, ended: Ended, begin: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            SPAN,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes(ended, self._model, str(scope["state"]["request_id"])),
            start_time=begin,
        )
        if ended.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def attributes(ended: Ended, model: str, request_id: str) -> dict[str, Any]:
    """The known attributes of a span, under vLLM's names."""
    params = ended.params
    found = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": ended.n,
        "gen_ai.request.max_tokens": ended.max_tokens,
        "gen_ai.request.temperature": None if params is None else params.temperature,
        "gen_ai.request.top_p": None if params is None else params.top_p,
        "gen_ai.usage.prompt_tokens": ended.prompt_tokens,
        "gen_ai.usage.completion_tokens": ended.output_tokens,
        "gen_ai.usage.num_sequences": ended.n,
        "gen_ai.latency.time_in_queue": ended.queue,
        "gen_ai.latency.time_to_first_token": ended.ttft,
        "gen_ai.latency.e2e": ended.e2e,
        "gen_ai.latency.time_in_model_prefill": ended.prefill,
        "gen_ai.latency.time_in_model_decode": ended.decode,
        "gen_ai.latency.time_in_model_inference": ended.inference,
        "gen_ai.response.finish_reason": ended.finish_reason,
    }
    return {name: value for name, value in found.items() if value is not None}
