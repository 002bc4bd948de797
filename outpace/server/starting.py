"""What answers while the model is being loaded: the process lives, it is not ready, and how far it is."""

import time
import uuid
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.server.problems import ApiError, error_response
from outpace.server.responses import Health

LIVE = "/health/live"


class Front:
    """An ASGI app that answers by itself until it is given another, and then hands everything on."""

    def __init__(self, part: Callable[[], str], retry_after: int) -> None:
        """`part` says what the start is at."""
        self._part, self._retry_after = part, retry_after
        self._since = time.monotonic()
        self.app: ASGIApp | None = None
        """The server, once there is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope["path"].removeprefix(scope.get("root_path", "")))(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, path: str) -> Response:
        if path == LIVE:
            alive: Health = {"status": "ok"}
            return Response(msgspec.json.encode(alive), media_type="application/json")
        took = time.monotonic() - self._since
        error = ApiError(
            503, f"The server is starting: {self._part()}, {took:.0f} s so far.", code="starting", retry=True
        )
        return error_response(error, uuid.uuid4().hex, self._retry_after)
