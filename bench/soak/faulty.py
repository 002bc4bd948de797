"""Outpace with an engine process that fails on a signal: `python -m bench.soak.faulty serve MODEL ...`.

SIGUSR1 makes its next step raise an error, SIGUSR2 makes it sleep for a minute.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from outpace.runner.runner import Runner
from outpace.server import engine_process, supervisor
from outpace.types import Step, StepOutput

STALL = 60.0  # seconds


class InjectedError(RuntimeError):
    """The fault."""


def run_engine(fd: int) -> int:
    """The engine process; its exit code."""
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
    return engine_process.main(fd, os.getppid())


async def _process(sock: socket.socket) -> asyncio.subprocess.Process:
    """The supervisor's function of that name, with this file's engine process."""
    command = (sys.executable, "-m", "bench.soak.faulty", str(sock.fileno()))
    return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),), stdin=asyncio.subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        sys.exit(run_engine(int(sys.argv[1])))
    from outpace.cli.app import main

    supervisor._process = _process
    main()
