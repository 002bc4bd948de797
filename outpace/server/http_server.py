"""The HTTP server of `outpace serve` around any app: connection limits, signals, draining."""

import asyncio
import contextlib
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn, Protocol

import uvicorn
from starlette.types import ASGIApp

from outpace.errors import StateError
from outpace.log import logger
from outpace.server.connection import limited
from outpace.server.exit_codes import CUT_OFF, FINISHED
from outpace.server.listen import BACKLOG
from outpace.server.options import ServerConfig

FLUSH = 5  # seconds for clients to read the ends of their answers
DATE_TICK = 1.0  # seconds between updates of the date header
DRAIN_TICK = 0.02  # seconds between checks for running requests


class Backend(Protocol):
    """Answers the requests: an engine or a fleet of replicas."""

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""

    def drain(self) -> None:
        """Refuse new requests; running ones continue."""

    async def close(self) -> None:
        """Stop. Running requests get an error."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling (see `until_signal`), waking up once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Accept no more connections; the server ends when the open ones have ended."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Update the date header of answers until `end` is called."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), DATE_TICK)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def until_signal(
    server: HttpServer,
    serving: asyncio.Task[None],
    backend: Backend,
    running: Counter[int | None],
    patience: float,
    signals: tuple[asyncio.Event, asyncio.Event],
) -> int:
    """Serve until a signal, then drain. Returns the exit code. running: counts requests without a complete answer.

    After the first SIGTERM or SIGINT new requests get 503, and running ones have `patience` seconds to finish. Requests
    that still run then, or at a second signal, are cut off with an error.
    """
    first, second = signals
    await first_of(serving, asyncio.create_task(first.wait()))
    if serving.done():
        ended_by_itself(serving)
    backend.drain()
    logger.warning("draining (requests that still run: %d); a second signal ends them", running.total())
    abort, empty = asyncio.create_task(second.wait()), asyncio.create_task(drained(backend, running))
    await first_of(empty, abort, timeout=patience)
    empty.cancel()
    left = max(running.total(), backend.in_flight)
    if left:
        logger.warning("requests cut off: %d", left)
        await backend.close()
    server.end()
    await first_of(serving, abort, timeout=2 * FLUSH)
    server.force_exit = True
    await serving
    abort.cancel()
    return CUT_OFF if left else FINISHED


async def drained(backend: Backend, running: Counter[int | None]) -> None:
    """Wait until no request runs, and clients have read every answer."""
    while backend.in_flight or running.total():
        await asyncio.sleep(DRAIN_TICK)


def catch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: the first SIGTERM or SIGINT sets one, the second signal sets the other."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first, second


async def first_of(*tasks: asyncio.Task[Any], timeout: float | None = None) -> None:
    """Wait until one of the tasks is done."""
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's options, with the limits that act before a request reaches the app."""
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


def ended_by_itself(serving: asyncio.Task[None]) -> NoReturn:
    """Raise the error of an HTTP server that ended before `end` was called."""
    serving.result()
    raise StateError("the HTTP server ended by itself; its log says why")


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, config: ServerConfig, sock: socket.socket
) -> AsyncIterator[tuple[HttpServer, asyncio.Task[None]]]:
    """An HTTP server on a listening socket, and its task. It ends with the context."""
    server = HttpServer(uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield server, serving
    finally:
        server.force_exit = True
        server.end()
        await asyncio.gather(serving, return_exceptions=True)
