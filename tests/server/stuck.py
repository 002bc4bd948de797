"""The process that compiles grammars, and two grammars that no library gives us: one never ends, one eats memory."""

import signal
import sys

from outpace.server import compiling
from outpace.structured.compile import Compiler

REAL = compiling.compiled


def compiled(compiler: Compiler, data: bytes) -> bytes:
    """The answer to a job, if there is one."""
    if b"stuck" in data:
        signal.pause()
    held = []
    while b"hungry" in data:
        held.append(bytearray(2**24))
    return REAL(compiler, data)


if __name__ == "__main__":
    compiling.compiled = compiled
    compiling.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
