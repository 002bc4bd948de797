"""The process that compiles grammars: those of requests may take any time and memory, so it can be killed over one."""

import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from outpace.errors import InputError
from outpace.server.render import end_after, limit_memory
from outpace.structure import StructuredOutputs
from outpace.structured.compile import Compiler, Vocabulary

MADE, REFUSED, BROKEN = b"+", b"-", b"!"
"""First byte of an answer: what follows is the grammar, what is wrong with it, or what is wrong here."""
MAX_COMPILED = 8 * 2**20  # bytes of one compiled grammar
_THREADS = min(8, os.cpu_count() or 1)


class Job(msgspec.Struct, array_like=True):
    """What is to be compiled, and what the request calls it."""

    where: str
    kind: str
    value: str | bool | list[str]
    max_depth: int


def compiled(compiler: Compiler, data: bytes, warnings: Callable[[], str]) -> bytes:
    """The answer to a job. What xgrammar warns of it would pass over: that is refused. MemoryError: there is none."""
    job = msgspec.msgpack.decode(data, type=Job)
    warnings()
    try:
        asked: dict[str, Any] = {job.kind: job.value}
        made = compiler.compile(StructuredOutputs(**asked), job.where, job.max_depth).to_bytes()
    except InputError as error:
        return REFUSED + str(error).encode()
    except Exception as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            raise MemoryError from None  # what is left of this process is of no use
        return BROKEN + repr(error).encode()
    if warned := warnings():
        return REFUSED + f"{job.where}: it cannot be kept to exactly ({warned})".encode()
    if len(made) > MAX_COMPILED:
        return REFUSED + f"{job.where}: compiled it is longer than {MAX_COMPILED} bytes; make it simpler".encode()
    return MADE + made


def _warnings() -> Callable[[], str]:
    """Takes over standard error; what was written there since the last call."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    os.dup2(file.fileno(), 2)

    def take() -> str:
        file.seek(0)
        text = file.read(4096).decode(errors="replace")
        file.seek(0)
        file.truncate()
        _, found, message = text.partition("Warning: ")
        return message.strip().splitlines()[0][:200] if found else ""

    return take


def _address_space_mb() -> int:
    """What this process has now: libraries alone take gigabytes of it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    except (OSError, ValueError):
        return 1 << 20


def main(handle: int, megabytes: int, seconds: float) -> None:
    """Compile one grammar after the other until the parent is gone."""
    connection = Connection(handle)
    try:
        compiler = Compiler(Vocabulary.of_bytes(connection.recv_bytes()), _THREADS, cache_bytes=0)
        warnings = _warnings()
        limit_memory(_address_space_mb() + megabytes)
        connection.send_bytes(b"{}")  # ready
        while True:
            job = connection.recv_bytes()
            done = end_after(seconds)
            answer = compiled(compiler, job, warnings)
            done()
            connection.send_bytes(answer)
    except (EOFError, OSError, MemoryError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
