"""How many threads compute the steps of an engine on a CPU: as many as other programs leave cores for.

The threads of a step wait for each other after every product. When one of them has no core, because another program has
it, all others wait (and OpenMP lets them spin meanwhile, which takes cores from the one they wait for). On two cores
beside eight busy programs one thread was 9 times as fast as two; alone, two are. So the engine looks twice a second.
"""

import math
import os
import time
from collections.abc import Callable

import torch

from outpace.log import chosen
from outpace.runner.machine import Usage, cores, usage, used_by_others

LOOK_EVERY = 0.5  # seconds; the system counts in hundredths


class CpuThreads:
    """Sets the number of torch's threads for the time of steps. For one thread at a time."""

    def __init__(
        self,
        *,
        look: Callable[[], Usage | None] = usage,
        clock: Callable[[], float] = time.perf_counter,
        apply: Callable[[int], None] = torch.set_num_threads,
        threads: Callable[[], int] = torch.get_num_threads,
        cores: Callable[[], int] = cores,
        ranks: int = 1,
    ) -> None:
        """ranks: so many compute at once, each with its share. The other arguments are for tests."""
        self._look, self._clock, self._apply, self._threads, self._cores = look, clock, apply, threads, cores
        self._ranks = ranks
        self._begin(threads())
        self._before = look() if ranks == 1 else None  # other ranks are not other programs

    def _begin(self, threads: int) -> None:
        self._most = self._now = threads
        self._wanted = share(threads, self._ranks)

    def before_step(self) -> None:
        """Look at the machine, if that is due, and set the number of threads."""
        if (threads := self._threads()) != self._now:  # somebody else has set it, and knows why
            self._begin(threads)
        if self._most > 1:
            self._choose()
            self._set(self._wanted)

    def idle(self) -> None:
        """There is nothing to do: other code of this process gets its threads back."""
        self._set(self._most)

    def _choose(self) -> None:
        before = self._before
        if before is None or self._clock() - before.at < LOOK_EVERY or (now := self._look()) is None:
            return
        others, all_cores = used_by_others(before, now), self._cores()
        wanted = choose(self._wanted, self._most, all_cores - others)
        if wanted != self._wanted:
            chosen("threads", wanted, f"other programs use {others:.1f} of {all_cores} cores")
        self._before, self._wanted = now, wanted

    def _set(self, count: int) -> None:
        if count != self._now:
            self._apply(count)
            self._now = count


def for_engine(device: torch.device, *, deterministic: bool, ranks: int = 1) -> CpuThreads | None:
    """Where the number may change: on a CPU, unless the user has set it or wants the same bits every time."""
    if device.type != "cpu" or (deterministic and ranks == 1) or "OMP_NUM_THREADS" in os.environ:
        return None
    return CpuThreads(ranks=ranks)


def share(threads: int, ranks: int) -> int:
    """The threads of one of several ranks that compute at once; what the user has set counts for each of them."""
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // ranks)


def choose(now: int, most: int, free: float) -> int:
    """The number of threads for so many free cores. It changes by more than what comes and goes."""
    if free < now - 0.5:
        return max(1, min(most, math.floor(free + 0.5)))
    return max(now, min(most, math.floor(free + 0.25)))
