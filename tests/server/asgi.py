"""A client that speaks ASGI itself: it can leave at any moment, send a body in pieces, or never end it."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Call:
    """One request in progress."""

    app: ASGIApp
    path: str
    body: Any = None
    pieces: list[bytes] | None = None
    """Pieces of the body instead; an empty list: it never comes."""
    whole: bool = True
    """Whether the last piece ends the body."""
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    query: bytes = b""
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    taken: int = 0
    """Pieces of the body that the server has read."""
    sent: list[Message] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Make the request."""
        messages = self._messages()

        async def receive() -> Message:
            if messages:
                self.taken += 1
                return messages.pop(0)
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)
            self.changed.set()

        headers = {"content-type": "application/json", **self.headers}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
        }
        await self.app(scope, receive, send)

    def _messages(self) -> list[Message]:
        pieces = [json.dumps(self.body).encode()] if self.pieces is None else self.pieces
        return [
            {"type": "http.request", "body": piece, "more_body": not self.whole or number < len(pieces) - 1}
            for number, piece in enumerate(pieces)
        ]

    @property
    def status(self) -> int:
        """The status, or 0 before there is one."""
        return next((message["status"] for message in self.sent if message["type"] == "http.response.start"), 0)

    @property
    def answer_headers(self) -> dict[str, str]:
        """The headers of the answer; none before there is one."""
        starts = [message for message in self.sent if message["type"] == "http.response.start"]
        return {name.decode(): value.decode() for start in starts for name, value in start["headers"]}

    @property
    def ended(self) -> bool:
        """Whether the answer is whole."""
        return any(each["type"] == "http.response.body" and not each.get("more_body", False) for each in self.sent)

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()
