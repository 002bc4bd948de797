"""Replicas that are no processes: servers on Unix sockets in this event loop, which do as they are told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import msgspec

from outpace.replicas.fleet import Fleet
from outpace.replicas.pages import Pages
from outpace.replicas.serve_replicas import make_app
from outpace.server.guard import Guard
from outpace.server.options import ServerConfig
from tests.patience import PATIENCE
from tests.server.asgi import Call


@dataclass
class Got:
    """A request that a fake got, and how it may answer."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection

    def head(self, status: int, **headers: str) -> None:
        """Begin the answer."""
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        self._write(h11.Response(status_code=status, headers=named))

    def data(self, data: bytes) -> None:
        """Go on with it."""
        self._write(h11.Data(data))

    def end(self) -> None:
        """End it."""
        self._write(h11.EndOfMessage())

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        """A whole answer."""
        body = msgspec.json.encode(value)
        self.head(status, content_type="application/json", content_length=str(len(body)), **headers)
        self.data(body)
        self.end()

    def error(self, status: int, code: str) -> None:
        """The answer of a server that does not answer."""
        self.json({"error": {"message": f"it is {code}", "type": "t", "param": None, "code": code}}, status)

    def stream(self, *events: bytes) -> None:
        """Begin a stream."""
        self.head(200, content_type="text/event-stream; charset=utf-8")
        for event in events:
            self.data(event)

    async def die(self) -> None:
        """What was written comes out, and no more."""
        await self.writer.drain()
        self.writer.close()

    async def left(self) -> None:
        """Wait until the other side has gone."""
        while await asyncio.wait_for(self.reader.read(1), PATIENCE):
            pass

    def _write(self, event: h11.Event) -> None:
        self.writer.write(self.http.send(event) or b"")


Behaviour = Callable[[Got], Awaitable[None]]


@dataclass
class Fake:
    """One replica: it does with each request what `answer` says."""

    path: str
    answer: Behaviour
    got: list[Got] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        http, body, request = h11.Connection(h11.SERVER), b"", None
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(2**16))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.ConnectionClosed):
                return writer.close()
        assert request is not None
        headers = {name.decode(): value.decode() for name, value in request.headers}
        self.got.append(
            Got(request.method.decode(), request.target.decode(), headers, body, reader, writer, http),
        )
        try:
            await self.answer(self.got[-1])
        finally:
            writer.close()


async def hello(got: Got) -> None:
    """Answers any request."""
    got.json({"said": got.body.decode()})


@dataclass
class Routed:
    """A router in front of fakes."""

    fleet: Fleet
    fakes: list[Fake]
    app: Guard
    pages: Pages

    def call(self, path: str = "/v1/completions", body: Any = None, **more: Any) -> Call:
        """A request that has not begun."""
        given = {"prompt": "a"} if body is None else body
        return Call(self.app, path, given, **more)

    async def ask(self, path: str = "/v1/completions", body: Any = None, **more: Any) -> Call:
        """A request that has been answered."""
        call = self.call(path, body, **more)
        await asyncio.wait_for(call.run(), PATIENCE)
        return call

    async def get(self, path: str, **more: Any) -> Call:
        """One without a body."""
        return await self.ask(path, method="GET", pieces=[b""], **more)


@asynccontextmanager
async def routed(folder: Path, *behaviours: Behaviour, **options: Any) -> AsyncIterator[Routed]:
    """A router in front of a fake for each behaviour."""
    fakes = [Fake(str(folder / f"{index}.sock"), behaviour) for index, behaviour in enumerate(behaviours)]
    fleet = Fleet([fake.path for fake in fakes])
    app, pages, _ = make_app(fleet, ServerConfig(**{"allowed_hosts": ["*"], "access_log": False, **options}))
    async with AsyncExitStack() as stack:
        for fake, replica in zip(fakes, fleet.replicas, strict=True):
            server = await asyncio.start_unix_server(fake.serve, fake.path)
            stack.push_async_callback(server.wait_closed)
            stack.callback(server.close)
            replica.ready = True
        yield Routed(fleet, fakes, app, pages)
