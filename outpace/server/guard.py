"""Guard, around all routes: request id, header limits, API keys, admission, body limits, timeout, access log."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.log import logger
from outpace.server.caller import CALLER
from outpace.server.options import ServerConfig, host_name
from outpace.server.problems import (
    AMBIGUOUS,
    DONE,
    LOST,
    ApiError,
    ClientGone,
    as_api_error,
    error_response,
    is_stream,
)

OPEN = frozenset({"/health", "/health/live", "/health/ready", "/healthz"})
"""Paths that need no key."""
PROBES = OPEN | {"/metrics", "/status", "/status/experts"}
"""Paths that are polled every few seconds, and would fill the access log."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST_PATH = 256  # characters of a path in the access log
_GONE = 499  # nginx's code for a client that closed the connection
access = logging.getLogger("outpace.access")


class Keys:
    """API keys. A comparison always takes the same time, so that it reveals nothing."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def find(self, authorization: str | None) -> int | None:
        """Which key a header carries: as a bearer token, or as the password that a browser asks for."""
        given = _digest(_key_in(authorization or ""))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return matches.index(True) if any(matches) else None

    def __bool__(self) -> bool:
        return bool(self._digests)


def _path(scope: Scope) -> str:
    """The path of a route, without the prefix of a proxy (`root_path`)."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _key_in(authorization: str) -> str:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


class Guard:
    """ASGI middleware around all routes. Errors that routes raise become answers here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        options: ServerConfig,
        keys: Sequence[str],
        rejected: Callable[[str], None],
        ended: Callable[[str], None],
        running: Counter[int | None],
    ) -> None:
        """rejected: called with the reason when a request is refused; ended: with the outcome of each POST request.

        running: counts POST requests without a complete answer, by key.
        """
        self._app, self._options, self._keys = app, options, Keys(keys)
        self._rejected, self._ended, self._running = rejected, ended, running
        self._hosts = frozenset(map(host_name, options.allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            if self._options.root_path:  # routes are found with it and without
                scope["root_path"] = self._options.root_path
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        sent = _Sent(send, request_id)
        status, lost = 500, False
        key: int | None = None
        try:
            self._check_headers(scope)
            self._check_host(scope, headers)
            key = self._check_key(scope, headers)
            CALLER.set(key)
            async with self._admitted(scope, key), asyncio.timeout(self._options.request_timeout):
                await self._app(scope, self._limited(receive, headers), sent)
            status = sent.status
        except ClientGone:
            status = _GONE
        except Exception as error:
            problem = as_api_error(error, request_id)
            status, lost = problem.status, problem.code == LOST
            await self._fail(error, problem, request_id, scope, sent)
        except asyncio.CancelledError:
            status = _GONE
            raise
        finally:
            if scope["method"] == "POST":
                self._ended(_outcome(status, sent.status, lost))
            if self._is_logged(scope, status):
                self._log(scope, request_id, status, key, time.perf_counter() - begin)

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._options.max_headers or size > self._options.max_header_bytes:
            raise ApiError(431, "The headers of the request are too many or too long.", code="headers_too_large")
        names = {name for name, _ in headers}
        if b"content-length" in names and b"transfer-encoding" in names:  # a proxy may see another request than we do
            raise ApiError(400, "Send either Content-Length or Transfer-Encoding.", code=AMBIGUOUS)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        """Refuse names that are not the server's: a page of another site could make its own name point here."""
        if not self._hosts or "*" in self._hosts or _path(scope) in OPEN:
            return
        if host_name(headers.get("host", "")) not in self._hosts:
            raise ApiError(
                421, "The Host header names another server; the option allowed_hosts adds names.", code="wrong_host"
            )

    def _check_key(self, scope: Scope, headers: Headers) -> int | None:
        if not self._keys or _path(scope) in OPEN:
            return None
        key = self._keys.find(headers.get("authorization"))
        if key is None:
            raise ApiError(
                401, "The API key is missing or wrong; send 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )
        return key

    @asynccontextmanager
    async def _admitted(self, scope: Scope, key: int | None) -> AsyncIterator[None]:
        """Count a POST request; one too many is refused before its body is read.

        At `max_concurrent_requests` only keys above their fair part are refused, as in `Admission`.
        """
        if scope["method"] != "POST":
            yield
            return
        most, each = self._options.max_concurrent_requests, self._options.max_requests_per_key
        own = self._running[key]
        if self._running.total() >= most and own >= self._part(most, key):
            self._rejected("max_concurrent_requests")
            raise ApiError(
                429, f"The server works on {most} requests, its limit; try later.", code="overloaded", retry=True
            )
        if each is not None and own >= each:
            self._rejected("max_requests_per_key")
            raise ApiError(
                429,
                f"{each} requests of one caller are running (max_requests_per_key={each}); try later.",
                code="key_limit",
                retry=True,
            )
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1

    def _part(self, most: int, key: int | None) -> int:
        """The fair part of a limit for one of the keys that have requests running."""
        return max(1, most // len({key, *(other for other, count in self._running.items() if count)}))

    def _limited(self, receive: Receive, headers: Headers) -> Receive:
        """`receive` that refuses bodies that are too long or too slow."""
        most, room = self._options.max_body_bytes, self._options.max_body_bytes
        deadline, whole = asyncio.get_running_loop().time() + self._options.body_timeout, False
        length = headers.get("content-length", "")
        too_long = length.isdecimal() and int(length[:20]) > most

        async def limited() -> Message:
            nonlocal room, whole
            if whole:
                return await receive()
            if too_long:
                raise HTTPException(413, f"The body is longer than {most} bytes.")
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "The body took too long to arrive.") from None
            if message["type"] == "http.request":
                room -= len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if room < 0:
                    raise HTTPException(413, f"The body is longer than {most} bytes.")
            return message

        return limited

    async def _fail(self, error: Exception, problem: ApiError, request_id: str, scope: Scope, sent: "_Sent") -> None:
        """Send the client the error without internals, and log all of it."""
        unforeseen = not sent.status and not isinstance(error, ApiError)  # others are counted where they are raised
        if unforeseen and problem.code in ("overloaded", "engine_unavailable"):
            self._rejected(problem.code)
        if problem.status == 500:
            logger.error("request %s failed", request_id, exc_info=error)
        if not sent.status:
            response = error_response(problem, request_id, self._options.retry_after)
            if problem.status == 401 and (_path(scope) in ("/", "/docs") or _path(scope).startswith("/web/")):
                response.headers["www-authenticate"] = 'Basic realm="outpace: the password is an API key"'
            await response(scope, _nothing, sent)
        elif sent.is_stream:
            body = b"data: " + msgspec.json.encode(problem.body) + b"\n\n" + DONE
            await sent({"type": "http.response.body", "body": body})

    def _is_logged(self, scope: Scope, status: int) -> bool:
        is_probe = status < 400 and _path(scope) in PROBES
        return self._options.access_log and (self._options.access_log_probes or not is_probe)

    def _log(self, scope: Scope, request_id: str, status: int, key: int | None, seconds: float) -> None:
        client = scope.get("client")
        fields = {
            "request_id": request_id,
            "client": client[0] if client else "-",
            "method": scope["method"],
            "path": quote(scope["path"][:_LONGEST_PATH], safe="/:"),
            "status": status,
            "milliseconds": round(seconds * 1000, 1),
            "key": "-" if key is None else key,
            "user": quote(str(scope["state"].get("user") or "-"), safe=" @"),
        }
        access.info(
            "%(client)s %(method)s %(path)s %(status)d %(milliseconds).1f ms %(request_id)s key=%(key)s user=%(user)s",
            fields,
            extra=fields,
        )


def _outcome(status: int, begun: int, lost: bool) -> str:
    """The outcome of a request.

    begun: the status that its answer began with; lost: the engine began the request and could not finish it.
    """
    if status == _GONE:
        return "cancelled"
    if status < 400:
        return "done"
    if lost or status != begun:  # the latter is a stream that broke
        return "failed"
    if status in (429, 503):
        return "rejected"
    return "failed" if status >= 500 else "invalid"


class _Sent:
    """`send` that adds headers and remembers what has gone out."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._id = send, request_id.encode()
        self.status = 0
        self.is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
            self.is_stream = is_stream(headers)
            headers += [(b"x-request-id", self._id), (b"x-content-type-options", b"nosniff")]
            if all(name != b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": headers}
        await self._send(message)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
