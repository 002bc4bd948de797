"""A real Ray cluster on this machine, and applications that `outpace deploy` puts there."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.soak.client import Client
from bench.soak.server import OUTPACE, kill, launch, pids, proc, stat, until

CPUS = 8
"""Cores that the cluster is told it has, whatever there are."""
STORE = 100 * 2**20  # bytes
START = 300.0  # seconds for a cluster, or an application, to be ready
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass
class Cluster:
    """A head node."""

    address: str
    folder: Path
    """Of the logs."""
    port: int
    """Of Ray's HTTP proxy, which all applications share."""

    @property
    def client(self) -> Client:
        """A client with an empty ledger."""
        return Client(self.port)

    async def deploy(self, name: str, model: Path, *flags: str) -> float:
        """Deploy an application, or update it; the seconds until it is healthy."""
        begin = time.monotonic()
        where = ("--ray", "--address", self.address, "--name", name, "--port", str(self.port))
        await self._outpace("deploy", str(model), *where, "--device", "cpu", *flags)
        return time.monotonic() - begin

    async def stop(self, name: str) -> None:
        """Drain an application and end it."""
        await self._outpace("deploy", "--ray", "--address", self.address, "--stop", name)

    async def _outpace(self, *arguments: str) -> None:
        log = self.folder / f"outpace_{time.monotonic_ns()}.log"
        process = await launch(log, OUTPACE, *arguments)
        async with asyncio.timeout(START):
            code = await process.wait()
        if code:
            raise RuntimeError(f"outpace {' '.join(arguments)} ended with {code}: {log.read_text()[-2000:]}")


def replicas(name: str) -> list[int]:
    """The processes of an application's replicas, oldest first."""
    return sorted(pid for pid in pids() if proc(pid, "cmdline").startswith(f"ray::ServeReplica:{name}:Model"))


def engine_of(replica: int) -> int:
    """The engine process of a replica; 0: there is none."""
    engines = [pid for pid in pids() if "outpace.server.engine_process" in proc(pid, "cmdline")]
    return next((pid for pid in engines if (found := stat(pid)) and int(found[1]) == replica), 0)


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """A cluster that is ready; afterwards it and all processes that it started are gone."""
    port, log = str(_free_port()), folder / "ray.log"
    temporary = folder / "r"  # short: Ray puts sockets there, whose paths have at most 107 characters
    flags = ("--num-cpus", str(CPUS), "--object-store-memory", str(STORE), "--include-dashboard", "false")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # all processes inherit these
    head = ("start", "--head", "--block", "--port", port, "--node-ip-address", "127.0.0.1")
    process = await launch(log, RAY, *head, *flags, "--disable-usage-stats", "--temp-dir", str(temporary))
    try:

        def is_up() -> bool:
            return process.returncode is not None or "Ray runtime started" in log.read_text()

        await until(is_up, f"the cluster in {log}", START)
        assert process.returncode is None, f"the cluster did not start: {log.read_text()[-2000:]}"
        yield Cluster(f"127.0.0.1:{port}", folder, _free_port())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await process.wait()
        await kill(process)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
