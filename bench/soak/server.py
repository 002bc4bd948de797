"""Starts, inspects and ends processes: `outpace serve` with a tiny random model, and others."""

import asyncio
import contextlib
import inspect
import json
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
WAIT = 120.0  # timeout in seconds


def write_model(folder: Path, width: int, layers: int) -> int:
    """Write a random Llama with a tokenizer of bytes; returns its number of weights."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 8192}
    model = tiny("llama", **sizes, **tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(kw_only=True)
class Server(Client):
    """A running server, and a client of it."""

    process: asyncio.subprocess.Process
    """The HTTP process, which leads the session of all that it started."""
    log: Path
    start_seconds: float
    """From the start of the process until it was ready."""

    @property
    def pid(self) -> int:
        """Process id of the HTTP process."""
        return self.process.pid

    async def status(self) -> Any:
        """The numbers of /status."""
        return json.loads((await self.get("/status")).body)

    async def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return (await self.get("/health/ready")).status == 200

    async def until_ready(self, ready: bool = True) -> float:
        """Wait until the engine takes requests, or (ready=False) no requests; returns the seconds."""

        async def is_so() -> bool:
            return await self.is_ready() == ready

        return await until(is_so, f"ready: {ready}; the log is {self.log}")

    async def idle(self, seconds: float = 10.0) -> tuple[Any, dict[str, int]]:
        """Status and outcomes once nothing runs and all requests are counted, or as they are after a timeout."""
        end = time.monotonic() + seconds
        while True:
            status, counted = await self.status(), outcomes((await self.get("/metrics")).body.decode())
            is_idle = not status["running"] and not status["waiting"] and is_free(status)
            if (is_idle and sum(counted.values()) >= self.ledger.sent) or time.monotonic() > end:
                return status, counted
            await asyncio.sleep(0.05)


def is_free(status: Any) -> bool:
    """Whether no page of the cache is in use."""
    return bool(status["free_blocks"] == status["num_blocks"])


@contextlib.asynccontextmanager
async def serving(model: Path, *flags: str, program: tuple[str, ...] = OUTPACE) -> AsyncIterator[Server]:
    """Start a server; afterwards kill it with all processes that it started."""
    begin, command = time.monotonic(), (*program, "serve", str(model), "--device", "cpu", "--port", "0", *flags)
    async with started(model.parent, *command) as (process, log):
        said = await until_said(process, log, "\ncurl http")
        urls = [line for line in said.splitlines() if line.startswith("http://")]
        port = int(urls[-1].rpartition(":")[2])
        server = Server(port=port, process=process, log=log, start_seconds=time.monotonic() - begin)
        await server.until_ready()
        yield server


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = WAIT) -> float:
    """Wait for a condition; returns the seconds."""
    begin = time.monotonic()
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return time.monotonic() - begin
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def started(
    folder: Path, *command: str, **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """Start a program in its own session; yields it and its log. Afterwards kill all processes of the session."""
    log = folder / f"{time.monotonic_ns()}.log"
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=file, stderr=file, cwd=ROOT, env=variables, start_new_session=True
        )
    try:
        yield process, log
    finally:
        for pid in (process.pid, *session(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


async def until_said(process: asyncio.subprocess.Process, log: Path, text: str, seconds: float = WAIT) -> str:
    """Wait until a program has printed a text; returns its output so far."""
    await until(lambda: process.returncode is not None or text in log.read_text(), f"{text!r} in {log}", seconds)
    assert process.returncode is None, f"it ended: {log.read_text()[-2000:]}"
    return log.read_text()


async def end(process: asyncio.subprocess.Process, seconds: float = WAIT) -> int:
    """Stop a program with SIGTERM; returns its exit code."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(process.wait(), seconds)


async def run(folder: Path, *command: str, seconds: float = WAIT, **environment: str) -> tuple[int, str]:
    """Run a program to its end; returns its exit code and output."""
    async with started(folder, *command, **environment) as (process, log):
        return await asyncio.wait_for(process.wait(), seconds), log.read_text()


def proc(pid: int, name: str) -> str:
    """The text of a file of a process in /proc; empty: the process is gone."""
    try:
        return (Path("/proc") / str(pid) / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_lines() -> dict[int, str]:
    """The commands of all processes."""
    return {int(path.name): proc(int(path.name), "cmdline") for path in Path("/proc").iterdir() if path.name.isdigit()}


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty: the process is gone."""
    return proc(pid, "stat").rpartition(")")[2].split()


def session(leader: int) -> list[int]:
    """Live processes of a session without its leader."""
    found = {pid: stat(pid) for pid in command_lines() if pid != leader}
    return [pid for pid, fields in found.items() if fields and fields[0] != "Z" and int(fields[3]) == leader]


def engine_of(parent: int) -> int:
    """The newest engine process that a process has started; 0: there is none."""
    names = ("outpace.server.engine_process", "bench.soak.faulty")
    engines = [pid for pid, command in command_lines().items() if any(name in command for name in names)]
    return max((pid for pid in engines if stat(pid)[1:2] == [str(parent)]), default=0)
