"""Entry point of the engine process: what must be set before the imports, which take seconds.

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
    """Run the engine until the server goes; the exit code."""
    die_with(parent)
    faulthandler.enable()  # a crash, or the parent's SIGABRT to a worker that hangs, shows where
    for number in (signal.SIGINT, signal.SIGTERM):  # they come to the whole group; the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(fd, False)

    gc.disable()  # no collection finds garbage while modules are imported, and looking took a second of five

    from outpace.server.engine_main import run_engine  # imported late: this import takes seconds

    gc.freeze()  # what was imported stays: no collection needs to look at it
    gc.enable()
    return run_engine(fd)


def die_with(parent: int) -> None:
    """No engine without its server, however the server ends. Other systems than Linux rely on the socket's end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above, so no signal will come
        os._exit(ORPHANED)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    os._exit(code)  # at once: nothing here has to be taken apart
