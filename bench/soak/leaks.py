"""Does a process grow? Its memory, open files and threads at the end are compared with those at the beginning."""

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.soak.server import is_engine, session, stat

MOST_RSS_MB = 50.0
WINDOW = 5  # samples whose median counts
_MB = 2.0**20

DUMMY = """
import os, threading, time
kept = []
while True:
    kept.append((bytearray(os.urandom(1 << 22)), open("/dev/null")))
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(0.05)
"""
"""A program that leaks memory, files and threads."""


@dataclass(frozen=True)
class Sample:
    """What a process holds at a time."""

    seconds: float
    rss_mb: float
    fds: int
    threads: int


def sample(pid: int, begin: float) -> Sample | None:
    """A reading; None: the process is gone."""
    try:
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat(pid)
    if not fields:
        return None
    return Sample(time.monotonic() - begin, pages * 4096 / _MB, files, int(fields[17]))


@dataclass(frozen=True)
class Growth:
    """How much more a process holds at the end."""

    rss_mb: float
    fds: float
    threads: float

    @property
    def leaks(self) -> bool:
        """Whether that is too much."""
        return self.rss_mb >= MOST_RSS_MB or self.fds > 0 or self.threads > 0

    def __str__(self) -> str:
        return f"{self.rss_mb:+.1f} MB, {self.fds:+g} fds, {self.threads:+g} threads"


def growth(before: Sequence[Sample], after: Sequence[Sample]) -> Growth:
    """The medians of readings at rest, later less earlier."""

    def rise(name: str) -> float:
        first, last = ([float(vars(each)[name]) for each in samples] for samples in (before, after))
        return statistics.median(last) - statistics.median(first)

    return Growth(rise("rss_mb"), rise("fds"), rise("threads"))


@dataclass
class Watch:
    """Reads the processes of one server every second."""

    pid: int
    begin: float = field(default_factory=time.monotonic)
    series: dict[str, list[Sample]] = field(default_factory=lambda: {"http": [], "engine": []})

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(1.0)

    def read(self) -> None:
        """One reading of each."""
        engine = max((pid for pid in session(self.pid) if is_engine(pid)), default=0)
        for name, pid in {"http": self.pid, "engine": engine}.items():
            if pid and (found := sample(pid, self.begin)) is not None:
                self.series[name].append(found)

    async def at_rest(self) -> dict[str, list[Sample]]:
        """Some readings in a row, of a server that has nothing to do."""
        counts = {name: len(samples) for name, samples in self.series.items()}
        for _ in range(WINDOW):
            self.read()
            await asyncio.sleep(0.2)
        return {name: samples[counts[name] :] for name, samples in self.series.items()}


async def positive_control(seconds: float = 1.0) -> Growth:
    """The growth of a program that leaks, by the same check."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DUMMY)
    try:
        watch = Watch(process.pid)
        await asyncio.sleep(0.3)
        before = await watch.at_rest()
        await asyncio.sleep(seconds)
        after = await watch.at_rest()
    finally:
        process.kill()
        await process.wait()
    return growth(before["http"], after["http"])
