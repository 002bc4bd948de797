"""Work for a client that may go away."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from outpace.server.problems import ClientGone

Result = TypeVar("Result")


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of some work, unless the client goes away first: then the work is cancelled."""

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
            _ = each.cancelled() or each.exception()  # read, so that asyncio does not warn of an unread error
