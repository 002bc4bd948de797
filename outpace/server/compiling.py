"""The process that compiles grammars. A grammar may take any time and memory, so this process can be killed."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from outpace.errors import InputError
from outpace.server.render import limit_memory, time_limit
from outpace.structured.compile import Compiler
from outpace.structured.grammar_text import GrammarText
from outpace.structured.outputs import StructuredOutputs
from outpace.structured.vocabulary import TokenVocabulary

MADE, REFUSED, BROKEN = b"+", b"-", b"!"
"""First byte of an answer: a grammar follows, an error in it, or an error of this process."""
MAX_ANSWER = 2**21  # bytes; a grammar is about as long as its schema


class CompileJob(msgspec.Struct, array_like=True):
    """What to compile, and the name of its field."""

    where: str
    asked: dict[str, Any]
    """Fields of `StructuredOutputs`."""
    max_depth: int


def compiled(compiler: Compiler, data: bytes) -> bytes:
    """The answer to a job. MemoryError: the process has to end."""
    job = msgspec.msgpack.decode(data, type=CompileJob)
    try:
        found = compiler.compile(StructuredOutputs(**job.asked), job.where, job.max_depth)
    except InputError as error:
        return REFUSED + str(error).encode()
    except Exception as error:
        if isinstance(error, MemoryError):
            raise  # nothing works in a process without memory
        return BROKEN + repr(error).encode()
    made = MADE + msgspec.msgpack.encode(GrammarText(found.text, found.later))
    if len(made) > MAX_ANSWER:
        return REFUSED + f"{job.where}: as a grammar it is longer than {MAX_ANSWER} bytes; make it simpler".encode()
    return made


def _address_space_mb() -> int:
    """Address space in use now: libraries alone take gigabytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    except (OSError, ValueError):
        return 1 << 20


def main(handle: int, megabytes: int, seconds: float) -> None:
    """Compile one grammar after the other until the parent is gone."""
    connection = Connection(handle)
    try:
        vocabulary = TokenVocabulary.of_bytes(connection.recv_bytes())
        compiler = Compiler(vocabulary, cache_bytes=0)
        _ = vocabulary.lengths  # cached now, because jobs have a timeout
        limit_memory(_address_space_mb() + megabytes)
        connection.send_bytes(b"{}")  # ready
        while True:
            job = connection.recv_bytes()
            with time_limit(seconds):
                answer = compiled(compiler, job)
            connection.send_bytes(answer)
    except (EOFError, OSError, MemoryError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
