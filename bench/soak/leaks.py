"""Does a process grow? Its memory, open files and threads at the end are compared with those at the beginning."""

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from bench.soak.server import is_engine, proc, session, stat

MOST_RSS_MB = 50.0
WINDOW = 5  # samples whose median counts

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
    """What a process holds at a time, or how much more it holds than before."""

    seconds: float
    rss_mb: float
    fds: float
    threads: float

    @property
    def leaks(self) -> bool:
        """Whether that is too much growth."""
        return self.rss_mb >= MOST_RSS_MB or self.fds > 0 or self.threads > 0

    def __str__(self) -> str:
        return f"{self.rss_mb:+.1f} MB, {self.fds:+g} fds, {self.threads:+g} threads"


def sample(pid: int, begin: float = 0.0) -> Sample | None:
    """A reading; None: the process is gone."""
    pages, fields = proc(pid, "statm").split(), stat(pid)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        if pages and fields:
            return Sample(time.monotonic() - begin, int(pages[1]) * 4096 / 2.0**20, files, int(fields[17]))
    return None


def growth(before: Sequence[Sample], after: Sequence[Sample]) -> Sample:
    """The medians of readings at rest, later minus earlier."""
    first, last = ([*map(statistics.median, zip(*map(astuple, each), strict=True))] for each in (before, after))
    return Sample(*(later - earlier for earlier, later in zip(first, last, strict=True)))


@dataclass
class Sampler:
    """Reads the processes of one server every second."""

    pid: int
    begin: float = field(default_factory=time.monotonic)
    series: dict[str, list[Sample]] = field(default_factory=lambda: {"http": [], "engine": []})

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(1.0)

    def read(self) -> None:
        """One reading of each process."""
        engine = max((pid for pid in session(self.pid) if is_engine(pid)), default=0)
        for name, pid in {"http": self.pid, "engine": engine}.items():
            if pid and (found := sample(pid, self.begin)) is not None:
                self.series[name].append(found)

    async def at_rest(self) -> dict[str, list[Sample]]:
        """Some readings in a row, of an idle server."""
        counts = {name: len(samples) for name, samples in self.series.items()}
        for _ in range(WINDOW):
            self.read()
            await asyncio.sleep(0.2)
        return {name: samples[counts[name] :] for name, samples in self.series.items()}


async def positive_control(seconds: float = 1.0) -> Sample:
    """The growth of a program that leaks, by the same check."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DUMMY)
    try:
        sampler = Sampler(process.pid)
        await asyncio.sleep(0.3)
        before = await sampler.at_rest()
        await asyncio.sleep(seconds)
        after = await sampler.at_rest()
    finally:
        process.kill()
        await process.wait()
    return growth(before["http"], after["http"])
