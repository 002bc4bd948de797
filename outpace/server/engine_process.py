"""Entry point of the engine process: sets what must be set before the imports, which take seconds.

Usage: python -m outpace.server.engine_process FD PARENT, with the number of its socket and the pid of the server.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ORPHANED = 4
"""Exit code: the server was gone before this process could ask to die with it."""


def main(fd: int, parent: int) -> int:
    """Run the engine until the server is gone; returns the exit code."""
    die_with(parent)
    faulthandler.enable()  # a crash, or the parent's SIGABRT to a worker that hangs, prints the stacks
    for number in (signal.SIGINT, signal.SIGTERM):  # they come to the whole group; the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(fd, False)

    gc.disable()  # collections during imports find no garbage, and took one second of five

    from outpace.server.engine_main import run_engine  # imported late: this import takes seconds

    gc.freeze()  # imported modules stay: collections can skip them
    gc.enable()
    return run_engine(fd)


def die_with(parent: int) -> None:
    """End with the server, however that ends. Systems other than Linux rely on the closed socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above, so no signal will come
        os._exit(ORPHANED)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    os._exit(code)  # skips the slow cleanup of Python, which nothing here needs
