"""A server with nothing to do hardly computes: it waits, and wakes up a few times a second."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.server.live import RANKS, REPLICAS, Live, family

SPAN = 2.0  # seconds that are looked at
SPANS = 20  # spans, at most, of which one has to be calm: what earlier tests left behind comes to an end
WAKE_UPS = 8.0  # a second, of all its threads; measured: 3, and 15 before uvicorn's loop was replaced
SHARE = 0.05  # of a core; measured: 0.001


class Used(NamedTuple):
    """What the processes of a server have used so far."""

    wake_ups: int
    seconds: float
    at: float


def used(live: Live) -> Used:
    return Used(sum(map(wake_ups, family(live.server.process.pid))), live.cpu_seconds(), time.monotonic())


def wake_ups(pid: int) -> int:
    """How often threads of a process went to sleep by themselves: to be thrown off a busy processor does not count."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            lines = (task / "status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def is_calm(live: Live) -> bool:
    before = used(live)
    time.sleep(SPAN)
    after = used(live)
    took = after.at - before.at
    return after.wake_ups - before.wake_ups < WAKE_UPS * took and after.seconds - before.seconds < SHARE * took


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell how often threads wake up")
@pytest.mark.skipif(RANKS in os.environ or REPLICAS in os.environ, reason="gloo and the router wake up more often")
def test_an_idle_server_hardly_wakes_up(live: Live) -> None:
    assert any(is_calm(live) for _ in range(SPANS))
