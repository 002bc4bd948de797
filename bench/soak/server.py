"""A real `outpace serve` on a tiny random model: start it, look at it, end it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.soak.client import Client, outcomes
from tests.models import byte_tokenizer, tiny

ROOT = Path(__file__).parent.parent.parent
OUTPACE = (sys.executable, "-m", "outpace")
FAULTY = (sys.executable, "-m", "bench.soak.faulty")
"""The same program with an engine process that fails when it is told to."""
WAIT = 120.0  # seconds for anything that has to happen


def write_model(folder: Path, width: int, layers: int) -> int:
    """A random Llama with a tokenizer of bytes; its number of weights."""
    tokenizer = byte_tokenizer()
    model = tiny(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def until(condition: Callable[[], bool], what: str, seconds: float = WAIT) -> float:
    """Wait for something; the seconds it took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - begin


@dataclass
class Server:
    """A server's process."""

    process: asyncio.subprocess.Process
    client: Client
    log: Path
    start_seconds: float
    """From the start of the process until it was ready."""

    @property
    def pid(self) -> int:
        """The HTTP process; its session has all that it started."""
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """The newest engine process, 0: there is none."""
        return max((pid for pid in session(self.pid) if is_engine(pid)), default=0)

    async def status(self) -> Any:
        """The numbers of /status."""
        return (await self.client.get("/status")).json

    async def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return (await self.client.get("/health/ready")).status == 200

    async def until_ready(self, seconds: float = WAIT) -> float:
        """Wait for the engine; the seconds it took."""
        begin = time.monotonic()
        while not await self.is_ready():
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"not ready within {seconds:g} s; the log is {self.log}")
            await asyncio.sleep(0.02)
        return time.monotonic() - begin

    async def outcomes(self) -> dict[str, int]:
        """How requests ended, as the server counted."""
        return outcomes((await self.client.get("/metrics")).body.decode())

    async def idle(self, seconds: float = 10.0) -> tuple[Any, dict[str, int]]:
        """Status and outcomes once nothing runs and all requests are counted, or as they are when time is up."""
        end = time.monotonic() + seconds
        while True:
            status, counted = await self.status(), await self.outcomes()
            settled = (
                not status["running"] and not status["waiting"] and sum(counted.values()) >= self.client.ledger.sent
            )
            if (settled and status["free_blocks"] == status["num_blocks"]) or time.monotonic() > end:
                return status, counted
            await asyncio.sleep(0.05)

    async def end(self, number: int = signal.SIGTERM) -> int:
        """End it in good order; the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), WAIT)


@contextlib.asynccontextmanager
async def serving(model: Path, *flags: str, program: tuple[str, ...] = OUTPACE) -> AsyncIterator[Server]:
    """A server that is ready; it is gone afterwards, with all that it started."""
    log = model.parent / f"server_{time.monotonic_ns()}.log"
    begin = time.monotonic()
    process = await launch(log, program, "serve", str(model), "--device", "cpu", "--port", "0", *flags)
    try:

        def greeted() -> bool:
            return process.returncode is not None or "\ncurl http" in log.read_text()

        await until(greeted, f"the server's greeting in {log}")
        lines = [line for line in log.read_text().splitlines() if line.startswith("http://")]
        assert lines, f"the server did not start: {log.read_text()[-2000:]}"
        server = Server(process, Client(int(lines[-1].rpartition(":")[2])), log, time.monotonic() - begin)
        await server.until_ready()
        yield server
    finally:
        for pid in (process.pid, *session(process.pid)):
            _kill(pid)
        await process.wait()


async def launch(log: Path, program: tuple[str, ...], *arguments: str) -> asyncio.subprocess.Process:
    """Start a program in a session of its own, with its output in a file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *(*program, *arguments), stdout=file, stderr=file, cwd=ROOT, env=environment, start_new_session=True
        )


def stat(pid: int) -> list[str]:
    """Fields of a process from its state on; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def cpu_seconds(pid: int) -> float:
    """What a process has used of the cores."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def session(leader: int) -> list[int]:
    """Processes of a session that live, but its leader."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = {pid: stat(pid) for pid in pids if pid != leader}
    return [pid for pid, fields in found.items() if fields and fields[0] != "Z" and int(fields[3]) == leader]


def is_engine(pid: int) -> bool:
    """Whether a process is an engine."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"outpace.server.engine_process" in command or b"bench.soak.faulty" in command


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def prompt(number: int, length: int = 16) -> str:
    """A prompt of so many tokens, of a byte each, that no other number has."""
    return (f"{number:06d} " + "lorem ipsum " * (length // 12 + 1))[:length]
