"""BigJobs: work on large requests, one piece at a time in a thread, in turns between API keys.

One at a time: each needs many times its size in memory, and several threads that compute would take the GIL from the
event loop more often.
"""

import asyncio
import contextlib
import ctypes
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from outpace.errors import Overloaded
from outpace.server.caller import CALLER

Result = TypeVar("Result")
REST = 1.0  # seconds without a job until free memory goes back


class BigJobs:
    """A thread that does one job after the other. Every key has its own queue; the queues take turns."""

    def __init__(self, what: str, most: int | None = None) -> None:
        """what: the jobs, for the error that is raised when `most` of one key wait; None: any number may."""
        self._what, self._most = what, most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what.replace(" ", "-"))
        self._waiting: dict[int | None, deque[asyncio.Future[None]]] = {}  # by key, the next turn first
        self._busy = False
        self._rest: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in the thread, in the context of the caller. Overloaded: too many wait."""
        await self._turn()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, copy_context().run, function, *arguments)
        finally:
            self._next()

    async def _turn(self) -> None:
        if not self._busy:
            self._busy = True
            if self._rest is not None:
                self._rest.cancel()
            return
        queue = self._waiting.setdefault(CALLER.get(), deque())
        if self._most is not None and len(queue) >= self._most:
            raise Overloaded(f"{len(queue)} {self._what} are waiting; try later")
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in queue:
                queue.remove(turn)
            else:  # its turn had come
                self._next()
            raise

    def _next(self) -> None:
        """Let the next one run: the first of the key whose turn it is."""
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            turn = queue.popleft() if queue else None
            if queue:
                self._waiting[key] = queue  # at the end
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._busy = False
        self._rest_later()

    def _rest_later(self) -> None:
        """Give free memory back to the system once there was nothing to do for a while, and answers have been sent."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = asyncio.get_running_loop().call_later(REST, self._thread.submit, give_memory_back)

    def close(self) -> None:
        """End the thread."""
        if self._rest is not None:
            self._rest.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def give_memory_back() -> None:
    """Return what is free to the system: glibc keeps gigabytes for threads that once needed them."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
