"""Runs `outpace serve`: the engine process, the HTTP server in front of it, and an orderly end.

The port is open at once; until the model is loaded `Placeholder` answers. Then it hands over to the server's app,
which is imported while the engine loads: do not import FastAPI or transformers at the top of this file.
"""

import asyncio
import gc
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from outpace.loading.read_tokenizer import import_without_torch, is_here, load_tokenizer
from outpace.log import by_part
from outpace.server.exit_codes import INTERRUPTED
from outpace.server.greeting import greeting
from outpace.server.http_server import (
    catch_signals,
    ended_by_itself,
    first_of,
    listening,
    until_signal,
)
from outpace.server.launch import process_age
from outpace.server.options import ServerConfig
from outpace.server.placeholder import Placeholder
from outpace.server.supervisor import Supervisor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from transformers import PreTrainedTokenizerBase

SWITCH = 0.001  # seconds that a thread may keep the event loop waiting; Python's own 5 ms add up over a request


async def serve_http(
    model: str | None,
    engine: Supervisor,
    config: ServerConfig,
    sock: socket.socket,
    console: Console,
    before: float,
) -> int:
    """Serve on a listening socket until a signal; returns the exit code.

    The engine has been launched, and its owner closes it. before: age of this process at the launch, in seconds.
    """
    sys.setswitchinterval(SWITCH)
    signals = catch_signals()
    gc.disable()  # until all is imported: collections find no garbage yet, and take a fifth of the time
    traces: TracerProvider | None = None
    front = Placeholder(lambda: engine.starting, config.retry_after, config.root_path)
    try:
        async with listening(front, config, sock) as (server, serving):
            tokenizer = await _loaded(model, engine, serving, signals[0])
            if signals[0].is_set():
                return INTERRUPTED

            from outpace.server.app import create_app  # `_loaded` has imported it, off the event loop
            from outpace.server.tracing import make_provider

            traces = make_provider(config.otlp_traces_endpoint)
            app = create_app(
                engine, config.model_copy(update={"allowed_hosts": config.hosts()}), tokenizer, traces=traces
            )
            async with app.router.lifespan_context(app):
                front.app = app
                parts = _parts(engine.status().startup_seconds, before)
                shown = by_part(parts, engine.card.weight_bytes, least=0.005)
                has_template = tokenizer is not None and bool(tokenizer.chat_template)
                console.print("\n".join(greeting(engine.card.name, shown, config, sock, has_template=has_template)))
                if engine.card.sampling:
                    shown = ", ".join(f"{name} {value}" for name, value in engine.card.sampling.items())
                    console.print(f"sampling defaults: {shown} (--generation-config none turns them off)")
                gc.collect()
                gc.enable()
                gc.freeze()  # loaded objects stay: collections can skip them
                return await until_signal(server, serving, engine, app.state.running, config.shutdown_timeout, signals)
    finally:
        gc.enable()
        gc.unfreeze()  # otherwise libraries report leaks at the end
        if traces is not None:
            await asyncio.to_thread(traces.shutdown)


async def _loaded(
    model: str | None, engine: Supervisor, serving: asyncio.Task[None], interrupted: asyncio.Event
) -> "PreTrainedTokenizerBase | None":
    """Wait for the engine, import the app, and read the tokenizer.

    Returns early at a signal, or when the HTTP server has ended.
    """
    loading, signal_came = asyncio.create_task(wait_for_model(model, engine)), asyncio.create_task(interrupted.wait())
    try:
        await first_of(loading, signal_came, serving)
        if serving.done():
            ended_by_itself(serving)
        return loading.result() if loading.done() else None
    finally:
        for task in (loading, signal_came):
            task.cancel()
        await asyncio.gather(loading, signal_came, return_exceptions=True)


async def wait_for_model(model: str | None, engine: Supervisor) -> "PreTrainedTokenizerBase | None":
    """Wait for an engine that has been launched; import the app and read the tokenizer at the same time."""
    here = is_here(model)  # otherwise the engine downloads or converts it, and this process waits
    tokenizer, _ = await asyncio.gather(asyncio.to_thread(_import_and_read, model, here), engine.start())
    return tokenizer if here else await asyncio.to_thread(load_tokenizer, model)


def _import_and_read(model: str | None, here: bool) -> "PreTrainedTokenizerBase | None":
    """Import what `serve` needs later, and read the tokenizer of a model that is on this machine."""
    import_without_torch()

    import outpace.server.app  # noqa: F401

    return load_tokenizer(model) if here else None


def _parts(engine: Mapping[str, float], before: float) -> dict[str, float]:
    """Seconds of each part of the start: this process, the engine, this process again. They add up to "all"."""
    total = process_age()
    own = {"start": before, **{part: took for part, took in engine.items() if part != "all"}}
    return {**own, "http": total - sum(own.values()), "all": total}
