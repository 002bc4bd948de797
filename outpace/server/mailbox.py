"""Mailbox: what has come for one request and waits for its reader, at most one delta for each answer."""

import asyncio
from dataclasses import dataclass, field

from outpace.errors import OutpaceError
from outpace.server.admission import Size
from outpace.server.engine import Delta


@dataclass(slots=True, eq=False)
class Mailbox:
    """A request that the engine has not finished with."""

    number: int
    size: Size
    open: int  # answers that have not ended; 0 for a vector that has come
    begun: bool = False
    cancelled: bool = False
    unwanted: set[int] = field(default_factory=set)  # answers that the engine was asked to end
    deltas: dict[int, Delta] = field(default_factory=dict)
    vector: list[float] | None = None
    error: OutpaceError | None = None
    waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until something has come."""
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def wake(self) -> None:
        """Wake the reader."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def put(self, delta: Delta) -> None:
        """Add a delta; those of one answer are merged until the reader takes them."""
        self.open -= delta.finish_reason is not None
        if self.cancelled:
            return
        if delta.index in self.unwanted:
            if not self.open:
                self.wake()
            return
        waiting = self.deltas.setdefault(delta.index, delta)
        if waiting is not delta:
            waiting.merge(delta)
        self.wake()
