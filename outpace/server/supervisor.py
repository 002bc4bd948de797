"""Supervisor: an engine that heals. It starts the engine process, watches it, and starts another when it died or hangs.

A worker counts as dead when its process ended, its socket closed, or it has work and made no progress for
`stall_timeout` seconds. One without work is pinged now and then, and has as long to answer. Requests in flight get
EngineDead at once.

After `ready_timeout` seconds without any sign of life (a message, or CPU time: a long step on a CPU uses it, a stopped
process does not) it is not ready, and may still recover.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from outpace.errors import EngineDead, EngineUnavailable, OutpaceError, StateError
from outpace.log import logger
from outpace.server.admission import Admission
from outpace.server.child import import_path
from outpace.server.client import EngineClient
from outpace.server.engine import LEVEL_TOTALS, Delta, EngineRequest, EngineStatus, ModelCard
from outpace.server.messages import Start

GOODBYE = 5.0  # seconds a worker may take to end after its socket was closed
DUMP = 1.0  # seconds that a worker that hangs gets to write its stacks
TICK = 1.0  # seconds between checks of a worker; a closed socket is noticed at once
PINGS = 4  # of an idle worker in each `stall_timeout`
READY_PINGS = 2  # of an idle worker in each `ready_timeout`
SILENT = "the engine shows no sign of life"
RESTARTING = "the engine is being restarted"
DRAINING = "the server is shutting down"
Started = TypeVar("Started")
_TOTALS = ("steps", "prompt_tokens", "generated_tokens", "preemptions", "prefix_hits", "prefix_queries", "step_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How soon a process that ended is started again. All in seconds."""

    first_delay: float = 0.5
    """Before the first restart; the delay doubles with each further one."""
    longest_delay: float = 30.0
    healthy_after: float = 60.0
    """A process that lived this long resets the delay."""

    async def until_started(
        self, start: Callable[[], Awaitable[Started]], name: str, delay: float
    ) -> tuple[Started, float]:
        """Call `start` until it works, first after `delay`. Returns what it made, and the delay of the next restart."""
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, self.longest_delay)
            try:
                return await start(), delay
            except (OutpaceError, OSError) as error:
                logger.error("%s cannot be started (%s); again in %.2f s", name, error, delay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing(Restarts):
    """When a worker counts as dead, and how soon it is started again. All in seconds."""

    stall_timeout: float = 120.0
    """Without a step while there is work, or without an answer while there is none."""
    ready_timeout: float = 5.0
    """Without a sign of life, until it is not ready."""
    start_timeout: float = 1800.0
    """Until the model is loaded."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A worker's process that has not got its `Start` message."""

    process: asyncio.subprocess.Process
    socket: socket.socket
    since: float


@dataclass(frozen=True, slots=True)
class _Worker:
    process: asyncio.subprocess.Process
    client: EngineClient
    since: float


class Supervisor:
    """An `Engine` whose process is replaced when it fails."""

    def __init__(
        self,
        model: str | None,
        options: Mapping[str, Any] | None = None,
        *,
        admission: Admission | None = None,
        healing: Healing | None = None,
    ) -> None:
        """`options` are those of LLMConfig, as plain JSON values."""
        self._start = Start(model, dict(options or {}), logger.getEffectiveLevel())
        self._admission = admission
        self._healing = healing or Healing()
        self._worker: _Worker | None = None
        self._card: ModelCard | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._past = EngineStatus()  # totals of the workers that are gone
        self._draining = False
        self._newest: EngineClient | None = None  # of the worker that was started last
        self._silent = False  # the worker shows no sign of life
        self._launched: _Launched | None = None  # a process that `_spawn` has not taken over

    async def launch(self) -> None:
        """Start the process of the first worker and return at once: its imports take seconds."""
        self._launched = await self._launch()

    async def start(self) -> None:
        """Wait until the first worker is ready. Raises errors of the model and its options."""
        assert self._watcher is None, "it has been started"
        self._worker = await self._spawn()
        self._watcher = asyncio.create_task(self._watch(self._worker))

    @property
    def card(self) -> ModelCard:
        """The loaded model; it stays known while the engine is being restarted."""
        if self._card is None:
            raise StateError("the engine has not been started; await start() first")
        return self._card

    @property
    def starting(self) -> str:
        """The part of the start that a worker is in."""
        return "beginning" if self._newest is None else self._newest.part

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return None if self._worker is None else self._worker.process.pid

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return 0 if self._worker is None else self._worker.client.in_flight

    def room(self, requests: Sequence[EngineRequest]) -> contextlib.AbstractContextManager[None]:
        """Admit all of these requests or none."""
        return self._client().room(requests)

    def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until every answer has ended; closing the generator cancels the request."""
        return self._client().generate(request)

    async def embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        """The vector that each request asks for."""
        return await self._client().embed(requests)

    def status(self) -> EngineStatus:
        """The newest numbers; totals include those of earlier processes."""
        past = self._past
        if self._worker is None:
            part = "" if self._newest is None else f" ({self._newest.part})"
            why = DRAINING if self._draining else RESTARTING + part
            return replace(past, last_steps=list(past.last_steps), why=why)
        now = self._worker.client.status()
        if self._draining:
            now.ready, now.why = False, DRAINING
        elif not now.ready:
            now.why = RESTARTING
        elif self._silent:
            now.ready, now.why = False, SILENT
        now.restarts = past.restarts
        now.step_sizes = _added(now.step_sizes, past.step_sizes)
        now.expert_load = [_added(*each) for each in zip_longest(now.expert_load, past.expert_load, fillvalue=())]
        for name in _TOTALS:
            setattr(now, name, getattr(now, name) + getattr(past, name))
        now.levels = {
            name: count + (past.levels.get(name, 0) if name.endswith(LEVEL_TOTALS) else 0)
            for name, count in now.levels.items()
        }
        return now

    def drain(self) -> None:
        """Refuse new requests; running ones continue."""
        self._draining = True

    async def close(self) -> None:
        """End the engine process and wait for its end. Requests that run get EngineDead."""
        self._draining = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._launched is not None:
            self._launched.socket.close()
            await kill(self._launched.process)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.client.lose(DRAINING)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.process.wait(), GOODBYE)
            await kill(worker.process)

    def _client(self) -> EngineClient:
        if self._draining:
            raise EngineUnavailable(f"{DRAINING}; try again later")
        if self._worker is None:
            raise EngineUnavailable(f"{RESTARTING}; try again later")
        return self._worker.client

    async def _spawn(self) -> _Worker:
        """Start a worker and wait until it is ready."""
        launched, self._launched = self._launched or await self._launch(), None
        process = launched.process
        client = self._newest = EngineClient(self._admission)
        try:
            async with asyncio.timeout(self._healing.start_timeout):
                await client.open(launched.socket, self._start, since=launched.since)
        except BaseException as error:
            client.lose("the engine did not start")
            await kill(process)
            if isinstance(error, TimeoutError):
                raise EngineDead(f"the engine was not ready in {self._healing.start_timeout:g} s") from None
            raise
        self._card = client.card
        return _Worker(process, client, time.monotonic())

    async def _launch(self) -> _Launched:
        since = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            return _Launched(await _process(theirs), ours, since)

    async def _watch(self, worker: _Worker) -> None:
        """Wait for the end of each worker, and start the next."""
        healing, delay = self._healing, self._healing.first_delay
        while True:
            reason = await self._end_of(worker)
            logger.error("the engine (process %d) %s; starting it again", worker.process.pid, reason)
            self._bury(worker, reason)
            if reason == "hangs":
                await _dump(worker.process)
            await kill(worker.process)
            if time.monotonic() - worker.since >= healing.healthy_after:
                delay = healing.first_delay
            worker, delay = await healing.until_started(self._spawn, "the engine", delay)
            self._worker = worker

    async def _end_of(self, worker: _Worker) -> str:
        """Wait until a worker has ended or hangs; returns which, in words for the log."""
        client, process, healing = worker.client, worker.process, self._healing
        pulse, tick = _Pulse(process.pid, client), min(TICK, healing.stall_timeout / 4, healing.ready_timeout / 4)
        while not client.lost.is_set():
            # not `wait_for`: on Python 3.11 it ignores a cancellation that comes together with the event
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick):
                    await client.lost.wait()
            if process.returncode is not None:
                return f"ended with code {process.returncode}"
            self._silent = pulse.silence() > healing.ready_timeout
            if _hangs(client, healing):
                return "hangs"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return f"ended with code {await process.wait()}"
        return "gave up, and has not ended yet"

    def _bury(self, worker: _Worker, reason: str) -> None:
        """Fail the requests of a worker, and keep its totals."""
        status = self.status()
        self._worker, self._newest, self._silent = None, None, False
        worker.client.lose(f"the engine process {reason}")
        self._past = replace(
            status, ready=False, running=0, waiting=0, free_blocks=status.num_blocks, restarts=status.restarts + 1
        )


def _added(now: Sequence[int], past: Sequence[int]) -> list[int]:
    return [sum(each) for each in zip_longest(now, past, fillvalue=0)]


class _Pulse:
    """When a worker last gave a sign of life: a message, or CPU time."""

    def __init__(self, pid: int, client: EngineClient) -> None:
        self._pid, self._client = pid, client
        self._computed, self._at = cpu_ticks(pid), time.monotonic()

    def silence(self) -> float:
        """Seconds since the last sign of life."""
        now, computed = time.monotonic(), cpu_ticks(self._pid)
        if computed != self._computed:
            self._computed, self._at = computed, now
        return now - max(self._at, self._client.heard_at)


def cpu_ticks(pid: int) -> int:
    """CPU time of a process in ticks of the system's clock; 0 if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _hangs(client: EngineClient, healing: Healing) -> bool:
    """Whether an engine has work and makes no progress, or is idle and answers no ping. Pings one that is silent."""
    now, stall = time.monotonic(), healing.stall_timeout
    if client.in_flight:
        return now - client.progress_at > stall
    if client.pinged_at is not None:
        return now - client.heard_at > stall
    if now - client.heard_at > min(stall / PINGS, healing.ready_timeout / READY_PINGS):
        client.ping()
    return False


async def _process(sock: socket.socket) -> asyncio.subprocess.Process:
    """Start a worker at the other end of a socket, with this process's import path without the current folder."""
    module, arguments = "outpace.server.engine_process", (str(sock.fileno()), str(os.getpid()))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        pass_fds=(sock.fileno(),),
        stdin=asyncio.subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": import_path()},
    )


async def _dump(process: asyncio.subprocess.Process) -> None:
    """Make a worker that hangs write the stacks of its threads to its log, and end."""
    with contextlib.suppress(TimeoutError, ProcessLookupError):
        process.send_signal(signal.SIGABRT)
        async with asyncio.timeout(DUMP):
            await process.wait()


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    code = await process.wait()
    logger.debug("process %d ended with code %d", process.pid, code)
