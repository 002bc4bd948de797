"""CPU usage of other programs: on a busy machine measured figures are too low, and fewer threads are faster."""

import os
import time
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal


class Usage(NamedTuple):
    """CPU seconds used up to a point in time."""

    at: float
    everybody: float
    """Of all programs, on the cores that this process may use."""
    own: float


def cores() -> int:
    return len(os.sched_getaffinity(0))


def usage() -> Usage | None:
    """CPU time used so far; None if the system does not report it."""
    try:
        lines = _STAT.read_text().splitlines()
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return None
    columns = [line.split() for line in lines if line.partition(" ")[0] in mine]
    everybody = sum(int(row[1 + column]) for row in columns for column in _BUSY)
    return Usage(time.perf_counter(), everybody / ticks, time.process_time())


def used_by_others(before: Usage, now: Usage) -> float:
    """Average number of cores that other programs used between two points in time."""
    others = (now.everybody - before.everybody) - (now.own - before.own)
    return max(0.0, others / max(now.at - before.at, 1e-9))
