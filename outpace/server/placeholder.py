"""Placeholder: the app while the model is loading. It is alive but not ready, and shows which part of
the start is running."""

import html
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.server.problems import ApiError, error_response
from outpace.server.responses import Health, json_response

LIVE = "/health/live"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Outpace is starting</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="1"></head>
<body><h1>Outpace is starting</h1><p>{}</p><p>This page opens by itself when the model is loaded.</p></body></html>
"""
_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'", "cache-control": "no-store"}


class Placeholder:
    """An ASGI app that says that the server is starting; once `app` is set, it forwards everything to that."""

    def __init__(self, part: Callable[[], str], retry_after: int, root_path: str = "") -> None:
        """part: returns which part of the start is running."""
        self._part, self._retry_after, self._root_path = part, retry_after, root_path
        self._since = time.monotonic()
        self.app: ASGIApp | None = None
        """The server's app, once the model is loaded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, scope: Scope) -> Response:
        if scope["path"].removeprefix(self._root_path) == LIVE:
            alive: Health = {"status": "ok"}
            return json_response(alive)
        said = f"The server is starting: {self._part()}, {time.monotonic() - self._since:.0f} s so far."
        if _is_browser(scope):
            headers = {"retry-after": str(self._retry_after), **_PAGE_HEADERS}
            return Response(_PAGE.format(html.escape(said)), 503, headers, media_type="text/html")
        return error_response(ApiError(503, said, code="starting", retry=True), uuid.uuid4().hex, self._retry_after)


def _is_browser(scope: Scope) -> bool:
    """Whether a browser asks: only browsers accept HTML."""
    return scope["method"] in ("GET", "HEAD") and "text/html" in Headers(scope=scope).get("accept", "")
