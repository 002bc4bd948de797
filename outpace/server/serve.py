"""`outpace serve`: the engine process, the HTTP server in front of it, and an orderly end.

The port is open at once; until the model is loaded `starting.Front` answers. Then it hands over to the server's app,
which is imported meanwhile: neither FastAPI nor transformers may be imported at the top of this file.

The first SIGTERM or SIGINT drains: new requests get 503, those that run may finish for `shutdown_timeout` seconds. What
runs after that, or when a second signal comes, is cut off with an error.
"""

import asyncio
import contextlib
import gc
import json
import shlex
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from outpace.errors import StateError
from outpace.loading.read_tokenizer import import_without_torch, is_here, load_tokenizer
from outpace.log import by_part, logger
from outpace.server.connection import limited
from outpace.server.options import ServerConfig
from outpace.server.run import BACKLOG, CUT_OFF, FINISHED, INTERRUPTED, process_age
from outpace.server.starting import Front
from outpace.server.supervisor import Supervisor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from transformers import PreTrainedTokenizerBase

FLUSH = 5  # seconds for clients to read the ends of their answers
SWITCH = 0.001  # seconds that a thread may keep the event loop waiting; Python's own 5 ms add up over a request
DRAIN_TICK = 0.02  # seconds between looks at the requests that are left


async def serve(
    model: str | None,
    engine: Supervisor,
    config: ServerConfig,
    sock: socket.socket,
    console: Console,
    before: float,
) -> int:
    """Serve on a socket that listens, until a signal; the exit code.

    The engine has been launched; its owner closes it. before: what this process took to get there, in seconds.
    """
    sys.setswitchinterval(SWITCH)
    signals = _signals()
    gc.disable()  # until all is imported: there is no garbage yet, and looking for it takes a fifth of the time
    traces: TracerProvider | None = None
    front = Front(lambda: engine.starting, config.retry_after, config.root_path)
    server = _Server(_uvicorn(front, config))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        tokenizer = await _loaded(model, engine, serving, signals[0])
        if signals[0].is_set():
            return INTERRUPTED

        from outpace.server.app import create_app  # `_loaded` has imported it, off the event loop
        from outpace.server.tracing import make_provider

        traces = make_provider(config.otlp_traces_endpoint)
        app = create_app(engine, config.model_copy(update={"allowed_hosts": config.hosts()}), tokenizer, traces=traces)
        async with app.router.lifespan_context(app):
            front.app = app
            parts = _parts(engine.status().startup_seconds, before)
            shown = by_part(parts, engine.card.weight_bytes, least=0.005)
            console.print("\n".join(_greeting(engine.card.name, shown, config, sock, tokenizer)))
            if engine.card.sampling:
                shown = ", ".join(f"{name} {value}" for name, value in engine.card.sampling.items())
                console.print(f"sampling defaults: {shown} (--generation-config none turns them off)")
            gc.collect()
            gc.enable()
            gc.freeze()  # what is loaded stays: a collection that looks at it holds everybody up
            return await _serve(server, serving, engine, app.state.running, config.shutdown_timeout, signals)
    finally:
        gc.enable()
        gc.unfreeze()  # else libraries complain at the end of what they see as leaks
        await _closed(server, serving)
        if traces is not None:
            await asyncio.to_thread(traces.shutdown)


async def _loaded(
    model: str | None, engine: Supervisor, serving: asyncio.Task[None], interrupted: asyncio.Event
) -> "PreTrainedTokenizerBase | None":
    """Wait for the engine, import the app, and read the tokenizer.

    Comes back early when a signal is there or the HTTP server has ended.
    """

    loading, signal_came = asyncio.create_task(load(model, engine)), asyncio.create_task(interrupted.wait())
    try:
        await _first_of(loading, signal_came, serving)
        if serving.done():
            _ended_by_itself(serving)
        return loading.result() if loading.done() else None
    finally:
        for task in (loading, signal_came):
            task.cancel()
        await asyncio.gather(loading, signal_came, return_exceptions=True)


async def load(model: str | None, engine: Supervisor) -> "PreTrainedTokenizerBase | None":
    """Wait for an engine that has been launched, and meanwhile import the app and read the tokenizer."""
    here = is_here(model)  # otherwise the engine gets it, which may take torch, and this process waits for that
    tokenizer, _ = await asyncio.gather(asyncio.to_thread(_import_and_read, model, here), engine.start())
    return tokenizer if here else await asyncio.to_thread(load_tokenizer, model)


def _import_and_read(model: str | None, here: bool) -> "PreTrainedTokenizerBase | None":
    """Import what `serve` needs later, and read the tokenizer of a model that is on this machine."""
    import_without_torch()

    import outpace.server.app  # noqa: F401

    return load_tokenizer(model) if here else None


def _ended_by_itself(serving: asyncio.Task[None]) -> NoReturn:
    serving.result()
    raise StateError("the HTTP server ended by itself; its log says why")


async def _closed(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """End the HTTP server, if it has not ended."""
    server.should_exit = server.force_exit = True
    await asyncio.gather(serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    engine: Supervisor,
    running: Counter[int | None],
    patience: float,
    signals: tuple[asyncio.Event, asyncio.Event],
) -> int:
    """Serve until a signal, then drain; the exit code. running: counts requests that clients have not had whole."""
    first, second = signals
    await _first_of(serving, asyncio.create_task(first.wait()))
    if serving.done():
        _ended_by_itself(serving)
    engine.drain()
    logger.warning("draining: %d requests run; a second signal ends them", running.total())
    abort, drained = asyncio.create_task(second.wait()), asyncio.create_task(_drained(engine, running))
    await _first_of(drained, abort, timeout=patience)
    drained.cancel()
    left = max(running.total(), engine.in_flight)
    if left:
        logger.warning("%d requests are cut off", left)
        await engine.close()
    server.should_exit = True
    await _first_of(serving, abort, timeout=2 * FLUSH)
    server.force_exit = True
    await serving
    abort.cancel()
    return CUT_OFF if left else FINISHED


async def _drained(engine: Supervisor, running: Counter[int | None]) -> None:
    """Wait until nothing runs, and every answer has been taken."""
    await engine.drained()
    while running.total():
        await asyncio.sleep(DRAIN_TICK)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first and the second signal set."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first, second


async def _first_of(*tasks: asyncio.Task[Any], timeout: float | None = None) -> None:
    """Wait until one of these is done."""
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _uvicorn(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(
            config.body_timeout,
            config.max_header_bytes + 5 * config.max_body_bytes // 4 + 2**16,
            config.max_connections,
            config.connections_per_address,
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # the app writes its own
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(config.keep_alive_timeout)),
        timeout_graceful_shutdown=FLUSH,
        h11_max_incomplete_event_size=config.max_header_bytes,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )


def _parts(engine: Mapping[str, float], before: float) -> dict[str, float]:
    """What the start took by part: of this process, of the engine, and of this process again. They add up to "all"."""
    total = process_age()
    own = {"start": before, **{part: took for part, took in engine.items() if part != "all"}}
    return {**own, "http": total - sum(own.values()), "all": total}


def _greeting(
    name: str,
    took: str,
    config: ServerConfig,
    sock: socket.socket,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> list[str]:
    """What the start took, where the server is, and a first request to try."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http{'s' if config.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    served = config.served_model_name[0] if config.served_model_name else name
    body: dict[str, Any] = {"model": served, "max_tokens": 64}
    if tokenizer is not None and tokenizer.chat_template:
        route = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is a paged cache?"}]
    else:
        route = "/v1/completions"
        body["prompt"] = "A paged cache is"
    key = " -H 'authorization: Bearer KEY'" if config.all_api_keys() else ""
    return [
        *filter(None, [config.open_door()]),  # once more: the lines before it may be far up by now
        f"{served} is ready ({took})",
        url,
        f"curl {url}{route} -H 'content-type: application/json'{key} -d {shlex.quote(json.dumps(body))}",
    ]
