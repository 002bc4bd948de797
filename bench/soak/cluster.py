"""Starts a real Ray cluster on this machine, and deploys applications with `outpace deploy`."""

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.soak.server import OUTPACE, command_lines, end, run, started, until_said

CPUS = 8
"""Cores that Ray counts on, independent of the machine."""
STORE = 100 * 2**20  # bytes
START = 300.0  # seconds for a cluster, or an application, to be ready


@dataclass
class Cluster:
    """A head node."""

    address: str
    folder: Path
    """Folder of the logs."""
    port: int
    """Port of Ray's HTTP proxy, which all applications share."""

    async def deploy(self, name: str, model: Path, *flags: str) -> float:
        """Deploy an application, or update it; returns the seconds until it is healthy."""
        begin = time.monotonic()
        await self._outpace(str(model), "--name", name, "--port", str(self.port), "--device", "cpu", *flags)
        return time.monotonic() - begin

    async def stop(self, name: str) -> None:
        """Drain an application and end it."""
        await self._outpace("--stop", name)

    async def _outpace(self, *arguments: str) -> None:
        command = (*OUTPACE, "deploy", "--ray", "--address", self.address, *arguments)
        code, said = await run(self.folder, *command, seconds=START)
        if code:
            raise RuntimeError(f"outpace deploy {' '.join(arguments)} ended with {code}: {said[-2000:]}")


def replicas(name: str) -> list[int]:
    """Process ids of an application's replicas, oldest first."""
    found = command_lines()
    return sorted(pid for pid in found if found[pid].startswith(f"ray::ServeReplica:{name}:Model"))


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Start a cluster; afterwards kill it with all processes that it started."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # all processes inherit these
    port, proxy = _free_port(), _free_port()
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port))
    limits = ("--num-cpus", str(CPUS), "--object-store-memory", str(STORE))
    flags = ("--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats")
    temporary = folder / "r"  # short: Ray puts sockets there, whose paths have at most 107 characters
    async with started(folder, *command, *limits, *flags, "--temp-dir", str(temporary)) as (process, log):
        try:
            await until_said(process, log, "Ray runtime started", START)
            yield Cluster(f"127.0.0.1:{port}", folder, proxy)
        finally:
            with contextlib.suppress(TimeoutError):
                await end(process, 60)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
