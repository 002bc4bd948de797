"""Work for a client that may close its connection: read its body, or compute its answer."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from outpace.server.problems import ClientGone

Result = TypeVar("Result")


async def whole_body(receive: Receive) -> bytes:
    """The body of a request; `Guard` limits its length and how long it takes."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`. If the client closes the connection first, cancels the work and raises `ClientGone`."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait((task, watch))
        for each in (task, watch):
            _ = each.cancelled() or each.exception()  # read it: asyncio warns about unread errors
