"""Outpace with an engine process that fails on a signal: `python -m bench.soak.faulty serve MODEL ...`.

SIGUSR1 makes its next step raise an error, SIGUSR2 makes it sleep for a minute.
"""

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from outpace.runner.runner import Runner
from outpace.server import engine_main, engine_process, supervisor
from outpace.types import Step, StepOutput

STALL = 60.0  # seconds


class InjectedError(RuntimeError):
    """The fault."""


def run_worker(fd: int) -> int:
    """The engine process."""
    wanted: list[int] = []
    launch = Runner.launch

    def on_signal(number: int, frame: FrameType | None) -> None:
        wanted[:] = [number]

    def faulty(runner: Runner, step: Step) -> Callable[[], StepOutput]:
        number = wanted.pop() if wanted else 0
        if number == signal.SIGUSR1:
            raise InjectedError("a fault, as ordered")
        if number == signal.SIGUSR2:
            time.sleep(STALL)
        return launch(runner, step)

    Runner.launch = faulty  # type: ignore[method-assign, assignment]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, on_signal)
    engine_process.die_with(os.getppid())
    faulthandler.enable()  # the parent's SIGABRT to a worker that hangs shows where
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return engine_main.run_engine(fd)


async def _process(sock: socket.socket) -> asyncio.subprocess.Process:
    """The supervisor's function of that name, with this file's worker."""
    command = (sys.executable, "-m", "bench.soak.faulty", str(sock.fileno()))
    return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),), stdin=asyncio.subprocess.DEVNULL)


def main() -> None:
    """An engine process for a number, else the command line of Outpace."""
    if sys.argv[1].isdecimal():
        sys.exit(run_worker(int(sys.argv[1])))
    from outpace.cli.app import main as outpace

    supervisor._process = _process
    outpace()


if __name__ == "__main__":
    main()
