"""`outpace serve --replicas N`: start the router at the port and N servers behind it, serve, drain.

Each replica is a whole `outpace serve` (HTTP process and engine process) on a Unix socket in a folder of its own. The
router imports neither torch nor transformers.
"""

import asyncio
import contextlib
import json
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.config import AskedConfig
from outpace.errors import StateError
from outpace.replicas.fleet import Fleet
from outpace.replicas.keeper import Keeper, Program, Timing
from outpace.replicas.pages import Pages
from outpace.replicas.router import Router
from outpace.replicas.share_out import for_replicas
from outpace.replicas.upstream import Broken, fetch
from outpace.server.exit_codes import INTERRUPTED
from outpace.server.greeting import greeting
from outpace.server.guard import Guard
from outpace.server.http_server import (
    catch_signals,
    ended_by_itself,
    listening,
    until_signal,
)
from outpace.server.launch import process_age
from outpace.server.options import ServerConfig
from outpace.server.placeholder import Placeholder

LONGEST_PATH = 100  # bytes of the path of a Unix socket that every system takes
MORE_CONNECTIONS = 256  # of the router itself, beside those of clients
MORE_HEADERS, MORE_HEADER_BYTES = 4, 512  # those that the router adds


async def serve_replicas(
    model: str | None,
    llm_options: Mapping[str, Any],
    asked: AskedConfig,
    config: ServerConfig,
    sock: socket.socket,
    console: Console,
) -> int:
    """Serve on a listening socket until a signal; returns the exit code."""
    environments = for_replicas(asked, config.replicas)
    with _folder() as folder:
        fleet = _KeptFleet([str(folder / f"replica-{index}.sock") for index in range(config.replicas)])
        options = {"model": model, "options": {**llm_options, **options_of_replica(config)}}
        timing = Timing(answer=config.ready_timeout, silence=config.stall_timeout)
        app, pages, running = make_app(fleet, config)
        for replica, environment in zip(fleet.replicas, environments, strict=True):
            program = Program(options, environment)
            fleet.keepers.append(Keeper(fleet, replica, program, timing, retired=pages.numbers.retire))
        try:
            return await _serve(fleet, app, running, config, sock, console)
        finally:
            await fleet.close()


class _KeptFleet(Fleet):
    """A fleet with the keepers of its processes."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self.keepers: list[Keeper] = []

    async def close(self) -> None:
        """End all replicas. Requests that run get an error."""
        self.draining = self.closed = True
        self.wake()
        await asyncio.gather(*(each.close() for each in self.keepers))


def make_app(fleet: Fleet, config: ServerConfig) -> tuple[Guard, Pages, Counter[int | None]]:
    """The router with its guard, the pages that it answers itself, and the counter of its running requests."""
    running: Counter[int | None] = Counter()
    pages = Pages(fleet, config, lambda: router.retried)
    router = Router(fleet, config, pages.own())
    guard = Guard(
        router,
        options=config.model_copy(update={"allowed_hosts": config.hosts()}),
        keys=config.all_api_keys(),
        rejected=lambda reason: pages.rejected.update([reason]),
        ended=lambda outcome: pages.outcomes.update([outcome]),
        running=running,
    )
    return guard, pages, running


def options_of_replica(config: ServerConfig) -> dict[str, Any]:
    """The options of each replica: those of the router, except for what only the router does."""
    given = {name: value for name, value in config.given().items() if name not in ("ssl_certfile", "ssl_keyfile")}
    connections = config.max_connections + MORE_CONNECTIONS
    return {
        **given,
        "api_keys": [key.get_secret_value() for key in config.api_keys],
        "replicas": 1,
        "host": "127.0.0.1",
        "port": 0,
        "allowed_hosts": ["*"],
        "access_log": False,
        "max_connections": connections,
        "max_connections_per_address": connections,
        "max_headers": config.max_headers + MORE_HEADERS,
        "max_header_bytes": config.max_header_bytes + MORE_HEADER_BYTES,
    }


async def _serve(
    fleet: _KeptFleet,
    app: Guard,
    running: Counter[int | None],
    config: ServerConfig,
    sock: socket.socket,
    console: Console,
) -> int:
    signals = catch_signals()
    front = Placeholder(lambda: f"loading {config.replicas} replicas", config.retry_after, config.root_path)
    async with listening(front, config, sock) as (server, serving):
        await asyncio.gather(*(each.start() for each in fleet.keepers))
        code = await _started(fleet, front, app, serving, signals[0])
        if code is not None:
            return code
        took = f"{config.replicas} replicas, all {process_age():.2f} s"
        name, has_template = await _about(fleet, config)
        console.print("\n".join(greeting(name, took, config, sock, has_template=has_template)))
        return await until_signal(server, serving, fleet, running, config.shutdown_timeout, signals)


async def _started(
    fleet: _KeptFleet, front: Placeholder, app: Guard, serving: asyncio.Task[None], interrupted: asyncio.Event
) -> int | None:
    """Wait until all replicas are ready; the router answers as soon as one is. Returns a code if they never will."""

    async def first() -> None:
        while not fleet.num_ready:
            await fleet.changed()
        front.app = app

    async def ready() -> None:
        await asyncio.gather(first(), *(each.was_ready.wait() for each in fleet.keepers))

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(ready()), asyncio.create_task(interrupted.wait())]
    failures = [each.failed for each in fleet.keepers]
    try:
        await asyncio.wait([*tasks, serving, *failures], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            ended_by_itself(serving)
        if tasks[1].done():
            return INTERRUPTED
        return next((each.result() for each in failures if each.done()), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _about(fleet: Fleet, config: ServerConfig) -> tuple[str, bool]:
    """The name of the model, and whether it has a chat template."""
    keys, root = config.all_api_keys(), config.root_path.encode()
    headers = [(b"authorization", b"Bearer " + keys[0].encode())] if keys else []
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    json_type = (b"content-type", b"application/json")
    replica = fleet.first() or fleet.replicas[0]
    try:
        _, models = await fetch(replica.path, b"GET", root + b"/v1/models", headers)
        status, _ = await fetch(replica.path, b"POST", root + b"/tokenize", [*headers, json_type], chat)
        return str(json.loads(models)["data"][0]["id"]), status == 200
    except (Broken, ValueError, LookupError):
        return "the model", False


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for sockets that only this user can read; it is removed at the end."""
    try:
        made = tempfile.TemporaryDirectory(prefix="outpace-")
        if len(made.name) > LONGEST_PATH - len("/replica-63.sock"):
            made.cleanup()
            made = tempfile.TemporaryDirectory(prefix="outpace-", dir="/tmp")
    except OSError as error:
        raise StateError(f"TMPDIR: cannot make a folder for the sockets of replicas ({error})") from None
    with made as name:
        yield Path(name)
