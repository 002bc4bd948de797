"""Health, version, status, metrics."""

from dataclasses import asdict, replace
from statistics import median
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outpace._version import __version__
from outpace.server.engine import EngineStatus
from outpace.server.metrics import CONTENT_TYPE, imbalance
from outpace.server.problems import ApiError
from outpace.server.responses import ExpertStatus, Health, Status, Version, json_response
from outpace.server.routes.documented import answers
from outpace.server.services import Services

SPLIT_FUSE_BOUND = 2.5
"""A step with prefill and decode should take at most this many times one of decode alone, see `outpace.scheduler`."""


def step_limit_ms(status: EngineStatus) -> float | None:
    """The time that the token budget was chosen for, or what SplitFuse allows after the last steps of decode alone."""
    decodes = [step.milliseconds for step in status.last_steps if step.decode_tokens and not step.prefill_tokens]
    if status.step_limit_ms is not None or not decodes:
        return status.step_limit_ms
    return SPLIT_FUSE_BOUND * median(decodes)


def _status(services: Services, in_flight: int) -> dict[str, Any]:
    card, now = services.engine.card, services.engine.status()
    about = {
        "model": services.validator.names[0],
        "max_model_len": card.max_model_len,
        "sampling": card.sampling,
        "in_flight": in_flight,
        "dtype": card.dtype,
        "quantization": card.quantization,
        "device": card.device,
    }
    # `asdict` makes a copy of each step; as tuples they are arrays in JSON
    numbers = {**asdict(replace(now, expert_load=[])), "step_limit_ms": step_limit_ms(now)}
    del numbers["expert_load"]  # thousands of them, see /status/experts
    return {**about, **numbers}


def router(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Operation"])

    async def live() -> Response:
        """The HTTP process answers."""
        result: Health = {"status": "ok"}
        return json_response(result)

    async def ready() -> Response:
        """The engine works. While it is loaded, restarted or shut down: 503, with the reason."""
        status = services.engine.status()
        if not status.ready:
            why = f": {status.why}" if status.why else ""
            raise ApiError(503, f"The engine is not ready{why}.", code="not_ready", retry=True)
        return await live()

    routes.add_api_route("/health/live", live, response_model=None, responses=answers(Health, "It lives."))
    for path in ("/health/ready", "/health", "/healthz"):
        routes.add_api_route(path, ready, response_model=None, responses=answers(Health, "It is ready."))
        routes.add_api_route(path, ready, methods=["HEAD"], response_model=None, include_in_schema=False)
    routes.add_api_route("/health/live", live, methods=["HEAD"], response_model=None, include_in_schema=False)

    @routes.get("/version", response_model=None, responses=answers(Version, "The version."))
    async def version() -> Response:
        """The version of Outpace."""
        result: Version = {"version": __version__}
        return json_response(result)

    @routes.get("/status", response_model=None, responses=answers(Status, "The numbers."))
    async def status(request: Request) -> Response:
        """The model, and the newest numbers of the engine."""
        return json_response(_status(services, request.app.state.running.total()))

    @routes.get("/status/experts", response_model=None, responses=answers(ExpertStatus, "The load."))
    async def experts() -> Response:
        """Tokens of each expert of each layer since the start; at most a few seconds old if asked again."""
        now = services.engine.status()
        load = now.expert_load
        result: ExpertStatus = {
            "layers": now.expert_layers,
            "tokens": load,
            "imbalance": [imbalance(each) for each in load],
        }
        return json_response(result)

    if services.options.metrics:

        @routes.get("/metrics", response_model=None, responses=answers(None, "The metrics.", content="text/plain"))
        async def metrics() -> Response:
            """Numbers for Prometheus."""
            return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE})

    return routes
