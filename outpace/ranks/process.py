"""A rank's process as its parent sees it: how it is started, what it writes, how it ended. No torch."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import IO

from outpace._version import __version__

PROGRAM = "outpace.ranks.follower"
LAST_LINES = 6  # last lines of a rank's output to show if it ended without a reason
_AT_ONCE = 1 << 16  # bytes to read at a time
_LONGEST_LINE = 1 << 16  # most bytes of a line; longer ones are shown in pieces


def versions() -> dict[str, str]:
    """The versions of the packages that decide what a rank computes, without importing them."""
    return {"outpace": __version__, **{name: metadata.version(name) for name in ("torch", "transformers")}}


def start(
    control: socket.socket, environment: Mapping[str, str], kept: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a rank's process. It imports from the same paths as this process, but not from the current folder.

    control: its socket to the first rank. environment: added to ours. kept: other file descriptors to pass on.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(control.fileno()), str(os.getpid())],
        pass_fds=[control.fileno(), *kept],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,  # Ctrl-C in a terminal goes to this process only
        env={**os.environ, **environment, "PYTHONPATH": path},
    )


class Written:
    """The output of a rank: shown, and the last lines kept."""

    def __init__(self, rank: int, file: IO[bytes]) -> None:
        self._rank, self.file = rank, file
        os.set_blocking(file.fileno(), False)
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._unfinished = b""

    def forward(self) -> bool:
        """Show new output; returns whether more may come."""
        try:
            data = os.read(self.file.fileno(), _AT_ONCE)
        except BlockingIOError:
            return True
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE:
            lines, self._unfinished = [*lines, self._unfinished], b""
        for text in (line.decode(errors="replace") for line in lines):
            self.lines.append(text[:500])
            with contextlib.suppress(Exception):  # stderr may be closed
                sys.stderr.write(f"rank {self._rank}: {text}\n")
        return bool(data)


def end_of(process: "subprocess.Popen[bytes]", written: Written, seconds: float = 5.0) -> str:
    """Wait for the end of a process and describe it."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "closed its socket"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return how + (f"; it last wrote: {' / '.join(written.lines)}" if written.lines else "")


def watched(pid: int) -> int | None:
    """A pidfd, readable when this process ends; None: not supported by the system."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None
