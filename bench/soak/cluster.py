"""A real Ray cluster on this machine, and applications that `outpace deploy` puts there."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.soak.client import Client
from bench.soak.server import OUTPACE, ROOT, launch, session, stat, until

CPUS = 8
"""What the cluster believes to have, however many there are."""
STORE = 100 * 2**20  # bytes
START = 300.0  # seconds for a cluster, or an application, to be ready
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass
class Cluster:
    """A head node."""

    address: str
    folder: Path
    """Logs."""
    port: int
    """Where Ray's HTTP proxy listens; all applications share it."""

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
    return sorted(pid for pid, title in _titles().items() if title.startswith(f"ray::ServeReplica:{name}:Model"))


def engine_of(replica: int) -> int:
    """The engine process of a replica; 0: there is none."""
    engines = [pid for pid, title in _titles().items() if "outpace.server.engine_process" in title]
    return next((pid for pid in engines if (found := stat(pid)) and int(found[1]) == replica), 0)


def _titles() -> Mapping[int, str]:
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """A cluster that is ready; it is gone afterwards, with all that it started."""
    address = f"127.0.0.1:{_free_port()}"
    log, temporary = folder / "ray.log", folder / "r"  # short: Ray puts sockets there, whose paths are at most 107 long
    flags = ("--num-cpus", str(CPUS), "--object-store-memory", str(STORE), "--include-dashboard", "false")
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # of all that is started from here
    head = ("start", "--head", "--block", "--port", address.rpartition(":")[2], "--node-ip-address", "127.0.0.1")
    process = await launch(log, RAY, *head, *flags, "--disable-usage-stats", "--temp-dir", str(temporary))
    try:

        def is_up() -> bool:
            return process.returncode is not None or "Ray runtime started" in log.read_text()

        await until(is_up, f"the cluster in {log}", START)
        assert process.returncode is None, f"the cluster did not start: {log.read_text()[-2000:]}"
        yield Cluster(address, folder, _free_port())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await process.wait()
        for pid in (process.pid, *session(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def run_tests(url: str, *arguments: str, log: Path) -> tuple[int, str]:
    """pytest over tests of answers against a server that runs; the exit code and the last line."""
    environment = os.environ | {"OUTPACE_TEST_URL": url}
    command = (sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *arguments)
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file, cwd=ROOT, env=environment)
    code = await process.wait()
    return code, log.read_text().strip().splitlines()[-1]
