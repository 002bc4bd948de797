"""BigJobs: long jobs in a thread, one at a time, in turns between API keys.

One at a time: each needs many times its size in memory, and several threads that compute would take the GIL from the
event loop more often.
"""

import threading
from asyncio import wrap_future
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from outpace.errors import Overloaded
from outpace.heap import give_memory_back
from outpace.server.caller import CALLER

Result = TypeVar("Result")
REST = 1.0  # idle seconds until free memory is returned to the system
Job = tuple["Future[Any]", Callable[[], Any]]


class BigJobs:
    """A thread that does one job after the other. Every key has its own queue; the queues take turns.

    A running job goes on when its caller has left, so that abandoned jobs cannot pile up before those of others.
    """

    def __init__(self, what: str, most: int | None = None) -> None:
        """what: name of the jobs in errors; most: jobs of one key that may wait (None: any number)."""
        self._what, self._most = what, most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what.replace(" ", "-"))
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int | None, deque[Job]] = OrderedDict()  # by key, the next turn first
        self._busy = False
        self._wake = threading.Event()  # ends the pause after a job

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in the thread, in the context of the caller. Overloaded: too many wait."""
        context = copy_context()
        return await wrap_future(self.submit(lambda: context.run(function, *arguments)))

    def submit(self, function: Callable[[], Result]) -> "Future[Result]":
        """Queue a job of the caller. Overloaded: too many wait."""
        future: Future[Result] = Future()
        key = CALLER.get()
        with self._lock:
            if self._busy:
                queue = deque(job for job in self._waiting.get(key, ()) if not job[0].cancelled())
                if self._most is not None and len(queue) >= self._most:
                    raise Overloaded(f"{len(queue)} {self._what} are waiting; try later")
                queue.append((future, function))
                self._waiting[key] = queue
            else:
                self._wake.set()
                self._thread.submit(self._work, (future, function))
                self._busy = True
        return future

    def _work(self, job: Job | None) -> None:
        """Do a job and those that have been queued by then. Free memory is returned later, when answers are sent."""
        self._wake.clear()
        while job is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # raised where the job is awaited
                    future.set_exception(error)
            del future, function
            job = self._next()
        if not self._wake.wait(REST):
            give_memory_back()

    def _next(self) -> Job | None:
        """The first job of the key whose turn it is."""
        with self._lock:
            if not self._waiting:
                self._busy = False
                return None
            key, queue = self._waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._waiting[key] = queue  # at the end
            return job

    def close(self, *, wait: bool = False) -> None:
        """Cancel waiting jobs, and end the thread. wait: return when the running job has ended."""
        with self._lock:
            for queue in self._waiting.values():
                for future, _ in queue:
                    future.cancel()
            self._waiting.clear()
        self._wake.set()
        self._thread.shutdown(wait=wait, cancel_futures=True)
