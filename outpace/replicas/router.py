"""Router: the ASGI app that forwards requests to replicas, and answers a few itself.

An answer is sent to the client as it comes. Until its first byte is sent, a request whose replica fails begins again on
another: an answer that is not a stream is held until it is whole (or long), a stream until its first event. Streams are
forwarded in whole events, so that the error at the end of a broken one is an event of its own.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.replicas.asked import read
from outpace.replicas.choose import Wanted
from outpace.replicas.fleet import Fleet, Replica
from outpace.replicas.relay import Held, relay
from outpace.replicas.upstream import HOP_BY_HOP, Broken, Exchange, connected
from outpace.server.gone import until_gone, whole_body
from outpace.server.options import ServerConfig
from outpace.server.problems import LOST, ApiError
from outpace.server.supervisor import DRAINING

LOSSES = 3
"""Times that a request may be lost with its replica before it fails: it may be what kills them."""
UNAVAILABLE = "engine_unavailable"
_NOT_THERE = frozenset({UNAVAILABLE, "not_ready", "starting"})  # codes of a replica that has not begun the request
_OURS = HOP_BY_HOP | {b"content-length", b"x-request-id"}

Own = Callable[[Headers], Awaitable[Response]]
"""Answers a GET that the router does not forward; gets its headers."""


class Router:
    """Forwards requests to the replicas of a fleet. `Guard` is around it, and turns errors into answers."""

    def __init__(self, fleet: Fleet, options: ServerConfig, own: Mapping[str, Own]) -> None:
        """own: handlers of GET at these paths."""
        self._fleet, self._options, self._own = fleet, options, own
        self.retried = 0
        """Times that a request began again on another replica."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = str(scope["path"]).removeprefix(self._options.root_path)
        own = self._own.get(path) if scope["method"] in ("GET", "HEAD") else None
        if own is not None:
            response = await until_gone(receive, own(Headers(scope=scope)))
            await response(scope, receive, send)
            return
        if self._fleet.draining and scope["method"] == "POST":
            raise ApiError(503, f"{DRAINING}; try again later", code=UNAVAILABLE, retry=True)
        body = await whole_body(receive)
        wanted, scope["state"]["user"] = read(body, self._caller(scope)) if body else (Wanted(), None)
        await until_gone(receive, self._answer(_Request(scope, body), wanted, send))

    def _caller(self, scope: Scope) -> bytes:
        """Identifies the caller, if prefixes are cached for each caller separately."""
        if self._options.share_prefix_cache:
            return b""
        return hashlib.blake2b(Headers(scope=scope).get("authorization", "").encode()).digest()

    async def _answer(self, request: "_Request", wanted: Wanted, send: Send) -> None:
        """Ask one replica after the other, until one answers."""
        losses, refused, last = 0, set[int](), None
        while True:
            replica = await self._next(request, wanted, refused, wait=losses > 0)
            if replica is None:
                raise last or ApiError(503, "No replica is ready; try again later.", code="not_ready", retry=True)
            try:
                with self._fleet.counted(replica, wanted):
                    async with connected(replica.path) as exchange:
                        problem = await self._try(exchange, request, send)
                if problem is None:
                    return
            except Broken:
                problem = ApiError(503, "the replica ended; try again later", code=LOST, retry=True)
            if problem.code == LOST:
                losses += 1
            if problem.status == 503:
                self._fleet.set_ready(replica, False)  # until a probe finds it ready again
            else:
                refused.add(replica.index)
            if losses >= LOSSES or self._fleet.closed:
                raise problem
            last = problem
            self.retried += 1

    async def _next(self, request: "_Request", wanted: Wanted, without: set[int], *, wait: bool) -> Replica | None:
        """The replica to ask; None: none is ready. A request that was lost (`wait`) waits for one."""
        while True:
            is_read = request.method in (b"GET", b"HEAD")
            found = self._fleet.first() if is_read and not without else self._fleet.choose(wanted, without)
            if found is not None or not wait or without or self._fleet.closed:
                return found
            await self._fleet.changed()

    async def _try(self, exchange: Exchange, request: "_Request", send: Send) -> ApiError | None:
        """Have one replica answer. Returns its error if another should try."""
        await exchange.send(request.method, request.target, request.headers, request.body)
        head, held = await exchange.head(), Held()
        if head.status_code in (429, 503):
            problem = _problem(head.status_code, await held.whole(exchange))
            if problem is not None:
                return problem
        await relay(exchange, head, send, held)
        return None


class _Request:
    """The request that a replica is sent."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.method = scope["method"].encode()
        query = scope.get("query_string", b"")
        self.target = scope["raw_path"] + (b"?" + query if query else b"")
        self.body = body
        self.headers = [(name, value) for name, value in scope["headers"] if name not in _OURS]
        if all(name != b"host" for name, _ in self.headers):
            self.headers.append((b"host", b"replica"))  # HTTP/1.0 does without
        self.headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
        if body or scope["method"] not in ("GET", "HEAD"):
            self.headers.append((b"content-length", b"%d" % len(body)))


def _problem(status: int, body: bytes) -> ApiError | None:
    """The error with which a replica refused a request, if another may take it."""
    try:
        error: dict[str, Any] = msgspec.json.decode(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None
    again = code == "overloaded" if status == 429 else code == LOST or code in _NOT_THERE
    return ApiError(status, message, code=code, retry=True) if again else None
