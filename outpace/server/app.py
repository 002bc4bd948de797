"""create_app: the HTTP server as a function of its engine, its options and a tokenizer."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from outpace._version import __version__
from outpace.server.chat import need_tokenizer
from outpace.server.engine import Engine
from outpace.server.guard import Guard
from outpace.server.options import ServerConfig
from outpace.server.problems import as_api_error, error_response
from outpace.server.routes import health, mii, openai, page, text
from outpace.server.services import make_services
from outpace.server.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def create_app(
    engine: Engine,
    options: ServerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    traces: "TracerProvider | None" = None,
) -> FastAPI:
    """The server. Nothing is global: one process can have several. Without lifespan, call `app.state.services.close()`.

    `traces` gets a span for each request; its owner shuts it down. `app.state.running` counts requests without a
    complete answer.
    """
    keys = options.keys()  # read once: callers are known by their index in it
    services = make_services(engine, options, need_tokenizer(tokenizer), keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services.grammars.start()
        await services.renderer.render("", dict)  # the first chat need not wait for a process to start
        try:
            yield
        finally:
            services.close()

    app = FastAPI(
        title="Outpace",
        version=__version__,
        lifespan=lifespan,
        openapi_url="/openapi.json" if options.docs else None,
        docs_url=None,  # FastAPI's page needs files from other servers; `routes.page` has our own
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,  # Starlette would redirect to any host that the client names
    )
    app.router.default = _without_slash(app.router)
    app.state.services, app.state.options, app.state.running = services, options, Counter()
    for routes in (openai, text, mii, health, page):
        app.include_router(routes.router(services))

    async def on_error(request: Request, error: Exception) -> Response:
        name = str(request.state.request_id)
        return error_response(as_api_error(error, name), name, options.retry_after)

    app.add_exception_handler(HTTPException, on_error)
    app.add_exception_handler(RequestValidationError, on_error)
    if traces is not None:
        app.add_middleware(Tracing, provider=traces, model=services.validator.names[0])
    app.add_middleware(
        Guard,
        options=options,
        keys=[key.secret for key in keys],
        rejected=services.metrics.observe_rejection,
        ended=services.metrics.observe_outcome,
        running=app.state.running,
    )
    app.openapi = _schema(app)  # type: ignore[method-assign]
    return app


def _without_slash(router: Router) -> ASGIApp:
    """Answers paths without a route. One with a slash too many is redirected to the one without, relative to itself."""
    not_found = router.default

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        bare = {**scope, "path": path[:-1]}
        if path.endswith("/") and any(route.matches(bare)[0] is not Match.NONE for route in router.routes):
            last = quote(path.split("/")[-2], safe="")
            response = Response(status_code=307, headers={"location": f"../{last}"})
            await response(scope, receive, send)
        else:
            await not_found(scope, receive, send)

    return answer


def _schema(app: FastAPI) -> Any:
    """/openapi.json without FastAPI's own 422, which this server never sends."""
    make = app.openapi

    def schema() -> dict[str, Any]:
        made = make()
        for path in made["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made.get("components", {}).get("schemas", {}).pop(name, None)
        return made

    return schema
