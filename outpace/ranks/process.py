"""The process of a rank, as whoever started it sees it: what it writes, and how it ended. No torch."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

LAST_LINES = 6  # of what a rank wrote, if it did not say why it ends
_AT_ONCE = 1 << 16  # bytes to read at a time
_LONGEST_LINE = 1 << 16  # bytes; a longer one is shown in pieces


def start(
    program: str, control: socket.socket, environment: Mapping[str, str], kept: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """The process of a rank. It imports what this process would, and nothing from where it stands.

    control: its socket to the first rank. environment: beside ours. kept: numbers of other files it gets.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", program, str(control.fileno()), str(os.getpid())],
        pass_fds=[control.fileno(), *kept],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,  # Ctrl-C in a terminal goes to this process, which decides
        env={**os.environ, **environment, "PYTHONPATH": path},
    )


class Written:
    """What a rank writes: it is shown, and the last lines are kept."""

    def __init__(self, rank: int, file: IO[bytes]) -> None:
        self._rank, self.file = rank, file
        os.set_blocking(file.fileno(), False)
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._unfinished = b""

    def forward(self) -> bool:
        """Show what is new; whether more may come."""
        try:
            data = os.read(self.file.fileno(), _AT_ONCE)
        except BlockingIOError:
            return True
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE:
            lines, self._unfinished = [*lines, self._unfinished], b""
        for text in (line.decode(errors="replace") for line in lines):
            self.lines.append(text[:500])
            with contextlib.suppress(Exception):  # nobody has to be there to read it
                sys.stderr.write(f"rank {self._rank}: {text}\n")
        return bool(data)


def end_of(process: "subprocess.Popen[bytes]", written: Written, seconds: float = 5.0) -> str:
    """How a process ended that is about to, in words."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "closed its socket"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return how + (f"; it last wrote: {' / '.join(written.lines)}" if written.lines else "")


def watched(pid: int) -> int | None:
    """What becomes readable when this process ends; None: the system has no such thing."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None
