"""Finds leaks: compares memory, open files and threads of a process at the end with those at the beginning."""

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.soak.server import engine_of

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


class Sample(NamedTuple):
    """Memory, open files and threads of a process at some time, or their growth."""

    seconds: float
    rss_mb: float
    fds: float
    threads: float

    @property
    def leaks(self) -> bool:
        """Whether this growth is too much."""
        return self.rss_mb >= MOST_RSS_MB or self.fds > 0 or self.threads > 0

    def __str__(self) -> str:
        return f"{self.rss_mb:+.1f} MB, {self.fds:+g} fds, {self.threads:+g} threads"


def sample(pid: int, begin: float = 0.0) -> Sample:
    """Read a process; FileNotFoundError or ProcessLookupError: it is gone."""
    folder = Path(f"/proc/{pid}")
    fds, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
    pages = int((folder / "statm").read_text().split()[1])
    return Sample(time.monotonic() - begin, pages * 4096 / 2.0**20, fds, threads)


def growth(before: Sequence[Sample], after: Sequence[Sample]) -> Sample:
    """The growth from earlier to later samples at rest, by their medians."""
    pairs = zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
    return Sample(*(statistics.median(last) - statistics.median(first) for first, last in pairs))


class Sampler:
    """Reads the processes of one server every second."""

    def __init__(self, pid: int) -> None:
        self.begin = time.monotonic()
        self.series: dict[str, list[Sample]] = {"http": [], "engine": []}
        self._pid = pid

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._read()
            await asyncio.sleep(1.0)

    def _read(self) -> None:
        for name, pid in {"http": self._pid, "engine": engine_of(self._pid)}.items():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self.series[name].append(sample(pid, self.begin))

    async def at_rest(self) -> dict[str, list[Sample]]:
        """Several samples in a row; the server must be idle."""
        for _ in range(WINDOW):
            self._read()
            await asyncio.sleep(0.2)
        return {name: samples[-WINDOW:] for name, samples in self.series.items()}


async def positive_control(seconds: float = 1.0) -> Sample:
    """The growth of a program that leaks, measured in the same way."""
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
