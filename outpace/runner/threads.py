"""The number of CPU threads for an engine's steps: one for each core that other programs leave free.

The threads of a step wait for each other after every product. When one of them has no core because another program
uses it, all others wait (and OpenMP lets them spin, which takes cores from the one they wait for). On two cores
beside eight busy programs one thread was 9 times as fast as two. So the engine checks the load twice a second.
"""

import math
import os
import time
from collections.abc import Callable

import torch

from outpace.log import chosen
from outpace.runner.machine import Usage, cores, usage, used_by_others

LOOK_EVERY = 0.5  # seconds between checks; the system counts in hundredths


class CpuThreads:
    """Sets torch's number of threads while an engine has work. Not thread-safe.

    The number is global to the process, so it is restored for other code when the engine is idle.
    """

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
        """ranks: how many ranks on this machine share the cores. The other arguments are for tests."""
        self._look, self._clock, self._apply, self._threads, self._cores = look, clock, apply, threads, cores
        self._ranks = ranks
        self._begin(threads())
        self._before = look() if ranks == 1 else None  # other ranks do not count as other programs

    def _begin(self, threads: int) -> None:
        self._most = self._now = threads
        self._wanted = share(threads, self._ranks)

    def before_step(self) -> None:
        """Check the load, if that is due, and set the number of threads."""
        if (threads := self._threads()) != self._now:  # other code has changed it since: leave it
            self._begin(threads)
        if self._most > 1:
            self._choose()
            self._set(self._wanted)

    def idle(self) -> None:
        """Restore the number of threads for other code, since the engine is idle."""
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
    """A `CpuThreads` if the number may change: on a CPU, unless the user set it or wants bitwise equal results."""
    if device.type != "cpu" or (deterministic and ranks == 1) or "OMP_NUM_THREADS" in os.environ:
        return None
    return CpuThreads(ranks=ranks)


def share(threads: int, ranks: int) -> int:
    """Threads for one of several ranks on this machine; a number set by the user holds for each of them."""
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // ranks)


def choose(now: int, most: int, free: float) -> int:
    """The number of threads for `free` cores, with hysteresis against short changes of the load."""
    if free < now - 0.5:
        return max(1, min(most, math.floor(free + 0.5)))
    return max(now, min(most, math.floor(free + 0.25)))
