"""A real `outpace serve` on a tiny random model: start it, look at it, end it."""

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.soak.client import Client, outcomes
from tests.models import byte_tokenizer, tiny

ROOT = Path(__file__).parent.parent.parent
OUTPACE = (sys.executable, "-m", "outpace")
FAULTY = (sys.executable, "-m", "bench.soak.faulty")
"""The same program, with an engine process that fails on a signal."""
WAIT = 120.0  # seconds for anything that has to happen


def write_model(folder: Path, width: int, layers: int) -> int:
    """Write a random Llama with a tokenizer of bytes; its number of weights."""
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


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = WAIT) -> float:
    """Wait for a condition; the seconds it took."""
    begin = time.monotonic()
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return time.monotonic() - begin
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)


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
        """The HTTP process, which leads the session of all that it started."""
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """The newest engine process; 0: there is none."""
        return max((pid for pid in session(self.pid) if is_engine(pid)), default=0)

    async def status(self) -> Any:
        """The numbers of /status."""
        return (await self.client.get("/status")).json

    async def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return (await self.client.get("/health/ready")).status == 200

    async def is_not_ready(self) -> bool:
        """Whether the engine takes no requests."""
        return not await self.is_ready()

    async def until_ready(self) -> float:
        """Wait for the engine; the seconds it took."""
        return await until(self.is_ready, f"the server is ready; the log is {self.log}")

    async def idle(self, seconds: float = 10.0) -> tuple[Any, dict[str, int]]:
        """Status and outcomes once nothing runs and all requests are counted, or as they are after a timeout."""
        end = time.monotonic() + seconds
        while True:
            status, counted = await self.status(), outcomes((await self.client.get("/metrics")).body.decode())
            is_idle = not status["running"] and not status["waiting"] and is_free(status)
            if (is_idle and sum(counted.values()) >= self.client.ledger.sent) or time.monotonic() > end:
                return status, counted
            await asyncio.sleep(0.05)

    async def end(self) -> int:
        """Stop the server with SIGTERM; the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), WAIT)


def is_free(status: Any) -> bool:
    """Whether no page of the cache is in use."""
    return bool(status["free_blocks"] == status["num_blocks"])


@contextlib.asynccontextmanager
async def serving(model: Path, *flags: str, program: tuple[str, ...] = OUTPACE) -> AsyncIterator[Server]:
    """A server that is ready; afterwards it and all processes that it started are gone."""
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
        await kill(process)


async def launch(log: Path, program: tuple[str, ...], *arguments: str) -> asyncio.subprocess.Process:
    """Start a program in its own session, with its output in a file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *(*program, *arguments), stdout=file, stderr=file, cwd=ROOT, env=environment, start_new_session=True
        )


async def kill(leader: asyncio.subprocess.Process) -> None:
    """SIGKILL to a process and its session."""
    for pid in (leader.pid, *session(leader.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await leader.wait()


def proc(pid: int, name: str) -> str:
    """A file of a process in /proc; empty: the process is gone."""
    try:
        return (Path("/proc") / str(pid) / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def pids() -> list[int]:
    """All processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def stat(pid: int) -> list[str]:
    """Fields of a process from its state on; empty: it is gone."""
    return proc(pid, "stat").rpartition(")")[2].split()


def session(leader: int) -> list[int]:
    """Live processes of a session without its leader."""
    found = {pid: stat(pid) for pid in pids() if pid != leader}
    return [pid for pid, fields in found.items() if fields and fields[0] != "Z" and int(fields[3]) == leader]


def is_engine(pid: int) -> bool:
    """Whether a process is an engine."""
    command = proc(pid, "cmdline")
    return "outpace.server.engine_process" in command or "bench.soak.faulty" in command


def prompt(number: int, length: int = 16) -> str:
    """A prompt of that many one-byte tokens, different for each number."""
    return (f"{number:06d} " + "lorem ipsum " * (length // 12 + 1))[:length]
