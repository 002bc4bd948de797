"""The process that compiles grammars: those of requests may take any time and memory, so it can be killed over one."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from outpace.errors import InputError
from outpace.server.render import end_after, limit_memory
from outpace.structure import StructuredOutputs
from outpace.structured.compile import Compiler
from outpace.structured.vocabulary import Vocabulary

MADE, REFUSED, BROKEN = b"+", b"-", b"!"
"""First byte of an answer: what follows is the grammar, what is wrong with it, or what is wrong here."""
MAX_ANSWER = 2**21  # bytes; a grammar is about as long as what was asked


class Job(msgspec.Struct, array_like=True):
    """What is to be compiled, and what the request calls it."""

    where: str
    kind: str
    value: str | bool | list[str]
    compact: bool
    max_depth: int


class Made(msgspec.Struct, array_like=True):
    """A grammar that compiles, as text, and the keywords that it does not enforce."""

    grammar: bytes
    later: tuple[str, ...]


def compiled(compiler: Compiler, data: bytes) -> bytes:
    """The answer to a job. MemoryError: there is none."""
    job = msgspec.msgpack.decode(data, type=Job)
    try:
        asked: dict[str, Any] = {job.kind: job.value, "disable_any_whitespace": job.compact}
        found = compiler.compile(StructuredOutputs(**asked), job.where, job.max_depth)
    except InputError as error:
        return REFUSED + str(error).encode()
    except Exception as error:
        if isinstance(error, MemoryError):
            raise  # what is left of this process is of no use
        return BROKEN + repr(error).encode()
    made = MADE + msgspec.msgpack.encode(Made(found.to_bytes(), found.later))
    if len(made) > MAX_ANSWER:
        return REFUSED + f"{job.where}: as a grammar it is longer than {MAX_ANSWER} bytes; make it simpler".encode()
    return made


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
        vocabulary = Vocabulary.of_bytes(connection.recv_bytes())
        compiler = Compiler(vocabulary, cache_bytes=0)
        _ = vocabulary.lengths  # made before the first job, whose time is limited
        limit_memory(_address_space_mb() + megabytes)
        connection.send_bytes(b"{}")  # ready
        while True:
            job = connection.recv_bytes()
            done = end_after(seconds)
            answer = compiled(compiler, job)
            done()
            connection.send_bytes(answer)
    except (EOFError, OSError, MemoryError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
