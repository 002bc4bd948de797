"""Fleet: the replicas as the router sees them: which are ready, the load of each, and whether the server is ending."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from outpace.replicas.choose import Chooser, Wanted


@dataclass(slots=True)
class Replica:
    """One server."""

    index: int
    path: str
    """Its Unix socket."""
    ready: bool = False
    """Whether it takes requests."""
    restarts: int = 0
    """Processes of it that had to be replaced."""


class Fleet:
    """All replicas. For one event loop."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.replicas = [Replica(index, path) for index, path in enumerate(paths)]
        self.chooser = Chooser(len(paths))
        self.draining = False
        """New requests are refused."""
        self.closed = False
        """Requests that would have to begin again are refused too."""
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(self.chooser.running)

    @property
    def num_ready(self) -> int:
        """Replicas that take requests."""
        return sum(each.ready for each in self.replicas)

    def choose(self, wanted: Wanted, without: set[int]) -> Replica | None:
        """The replica for a request, except these; None: there is no such replica now."""
        ready = [each.index for each in self.replicas if each.ready and each.index not in without]
        index = self.chooser.choose(ready, wanted.prefixes)
        return None if index is None else self.replicas[index]

    def first(self) -> Replica | None:
        """The first that is ready, so that reading twice gives the same answer."""
        return next((each for each in self.replicas if each.ready), None)

    @contextmanager
    def counted(self, replica: Replica, wanted: Wanted) -> Iterator[None]:
        """Counts a request while it is with a replica."""
        self.chooser.begin(replica.index, wanted)
        try:
            yield
        finally:
            self.chooser.end(replica.index, wanted)

    def set_ready(self, replica: Replica, ready: bool) -> None:
        """Set whether a replica takes requests."""
        if replica.ready != ready:
            replica.ready = ready
            self.wake()

    def wake(self) -> None:
        """End all waits in `changed`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Wait until a replica is ready that was not, or the other way around."""
        await self._changed.wait()

    def drain(self) -> None:
        """Refuse new requests; running ones continue."""
        self.draining = True
