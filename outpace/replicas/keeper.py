"""Keeper: starts the process of one replica, probes it, and restarts it when it died or hangs."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.log import logger
from outpace.replicas.fleet import Fleet, Replica
from outpace.replicas.upstream import Broken, fetch
from outpace.server.exit_codes import NOT_STARTED, WRONG_OPTION
from outpace.server.supervisor import Restarts, kill

READY = b"/health/ready"
PROGRAM = (sys.executable, "-P", "-m", "outpace.server.from_stdin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Restarts):
    """How often a replica is probed, when it counts as dead, how soon it is started again. All in seconds."""

    probe: float = 1.0
    """From one probe to the next."""
    first_probe: float = 0.1
    """The same until it is first ready."""
    answer: float = 5.0
    """Without an answer until it counts as not ready."""
    silence: float = 120.0
    """Without an answer until it is killed."""
    goodbye: float = 10.0
    """To end after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command that reads its options from standard input, as one line of JSON, and ends when that input ends."""

    options: Mapping[str, Any]
    environment: Mapping[str, str]
    command: Sequence[str] = PROGRAM


class Keeper:
    """Keeps one replica of a fleet alive until it is closed."""

    def __init__(
        self, fleet: Fleet, replica: Replica, program: Program, timing: Timing, *, retired: Callable[[int], None]
    ) -> None:
        """`retired` is called with the index when a process of this replica has ended."""
        self._fleet, self._replica, self._program, self._timing = fleet, replica, program, timing
        self._retired = retired
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit code of the first process, if it could not start because of its model or options."""
        self.was_ready = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, and keep it from now on."""
        await self._launch()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the process; requests that it still has are cut off."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fleet.set_ready(self._replica, False)
        if self._process is not None and self._process.returncode is None:
            for number in (signal.SIGTERM, signal.SIGINT):  # different ones, so that both arrive: the second cuts off
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._timing.goodbye)
            await kill(self._process)

    async def _keep(self) -> None:
        """Wait for the end of each process, and start the next."""
        delay = self._timing.first_delay
        while True:
            since, process = time.monotonic(), self._process
            assert process is not None, "it was started"
            probing = asyncio.create_task(self._probe(process))
            try:
                code = await process.wait()
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
            if code in (NOT_STARTED, WRONG_OPTION) and not self.was_ready.is_set():
                self.failed.set_result(code)
                return
            self._bury(code)
            if time.monotonic() - since >= self._timing.healthy_after:
                delay = self._timing.first_delay
            name = f"replica {self._replica.index}"
            _, delay = await self._timing.until_started(self._launch, name, delay)

    def _bury(self, code: int) -> None:
        """Note that a process has ended: it gets no more requests, and its cached prefixes are gone."""
        logger.error(
            "replica %d (process %s) ended with code %d; starting it again", self._replica.index, self.pid, code
        )
        self._fleet.set_ready(self._replica, False)
        self._fleet.chooser.forget(self._replica.index)
        self._replica.restarts += 1
        self._retired(self._replica.index)

    async def _launch(self) -> None:
        Path(self._replica.path).unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *self._program.command,
            stdin=asyncio.subprocess.PIPE,
            env=dict(self._program.environment),
            start_new_session=True,  # Ctrl-C goes only to the router, which ends its replicas
        )
        assert self._process.stdin is not None, "it is a pipe"
        asked = {**self._program.options, "unix_path": self._replica.path}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        with contextlib.suppress(OSError):  # it has ended; its exit code says why
            await self._process.stdin.drain()

    async def _probe(self, process: asyncio.subprocess.Process) -> None:
        """Ask from time to time whether the process takes requests."""
        timing, heard = self._timing, time.monotonic()
        has_answered = False
        while True:
            status = await self._ask()
            if status is not None:
                has_answered, heard = True, time.monotonic()
            self._fleet.set_ready(self._replica, status == 200)
            if status == 200:
                self.was_ready.set()
            if has_answered and time.monotonic() - heard > timing.silence:
                logger.error("replica %d (process %d) hangs", self._replica.index, process.pid)
                await kill(process)
            await asyncio.sleep(timing.probe if self.was_ready.is_set() else timing.first_probe)

    async def _ask(self) -> int | None:
        """The status that it answers with; None: it does not answer in time."""
        with contextlib.suppress(Broken, TimeoutError):
            async with asyncio.timeout(self._timing.answer):
                return (await fetch(self._replica.path, b"GET", READY))[0]
        return None
