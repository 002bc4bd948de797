"""A process that does one job at a time and may be killed: for work that may not terminate."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

_START_TIMEOUT = 30.0  # seconds until a fresh process must answer; the first one waits for the disk
_INHERITED = ("PATH", "PYTHONPATH", "TZ", "LD_LIBRARY_PATH")


def import_path() -> str:
    """PYTHONPATH for a process that imports from the same places as this one, but not from the current folder."""
    return os.pathsep.join(path for path in sys.path if path)


class Child:
    """A Python process at the other end of a pipe; it ends when the pipe closes. For one thread at a time."""

    def __init__(
        self, program: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """The program gets the number of its end of the pipe, then the arguments."""
        self._connection, theirs = Pipe()
        self._ready = False
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *program, str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal goes only to the server, which ends this process
                env={**inherited, **(environment or {})},
            )
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process.poll() is None

    def ready(self, greeting: bytes | None = None) -> bool:
        """Wait until it has started; returns whether it has. greeting: a first message that it waits for."""
        if not self._ready:
            with contextlib.suppress(OSError):  # it has ended
                if greeting is not None:
                    self._connection.send_bytes(greeting)
                self._ready = self._connection.poll(_START_TIMEOUT) and bool(_received(self._connection, 16))
        return self._ready

    def ask(self, job: bytes, seconds: float, most: int) -> bytes | None:
        """Its answer to a job, at most `most` bytes. None: there was none in time, and it must be closed."""
        try:
            self._connection.send_bytes(job)
            if not self._connection.poll(seconds):
                return None
            return _received(self._connection, most) or None
        except (OSError, EOFError):
            return None

    def kill(self) -> None:
        """Kill it: `ask` in another thread returns None. May be called from any thread."""
        self._process.kill()

    def close(self) -> None:
        """End it, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _received(connection: "Connection[Any, Any]", most: int) -> bytes:
    try:
        return connection.recv_bytes(most)
    except (EOFError, ConnectionError):
        return b""
