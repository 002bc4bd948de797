"""Grammars of requests, compiled off the event loop in a process of their own, and kept."""

import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import msgspec
from transformers import PreTrainedTokenizerBase

from outpace.errors import Overloaded
from outpace.log import logger
from outpace.server.child import Child
from outpace.server.compiling import BROKEN, MADE, MAX_COMPILED, Job
from outpace.server.engine import ModelCard, WireGrammar
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError, bad
from outpace.server.tokens import in_threads
from outpace.structure import StructuredOutputs
from outpace.structured.cache import SizedCache
from outpace.structured.compile import Vocabulary

MAX_WAITING = 32  # requests that wait for the process
MAX_REFUSED = 1024  # of those that are remembered
TOO_LONG_FOR = 60.0  # seconds for which one that took too long is refused at once
TOO_MUCH = "limit_exceeded"
"""The code of grammars that took too much time or memory: another time they may not."""
_PROGRAM = ("-m", "outpace.server.compiling")


class Grammars:
    """Compiles for one model. The process is there from `start` on, or from the first grammar."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, card: ModelCard, options: ServerConfig) -> None:
        self._tokenizer, self._card, self._options = tokenizer, card, options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()  # of the cache
        self._cache: SizedCache[bytes, WireGrammar] = SizedCache(options.grammar_cache_mb * 2**20)
        self._refused: SizedCache[tuple[str, bytes], tuple[ApiError, float]] = SizedCache(MAX_REFUSED)
        self._child: Child | None = None
        self._waiting = 0
        self._closed = False

    def start(self) -> None:
        """Start the process, which takes seconds, and more on a busy machine: no request need wait for it.

        What fails here fails again when a grammar comes, and is told then.
        """
        self._thread.submit(self._running)

    async def compile(
        self, where: str, asked: StructuredOutputs, make: Callable[[], StructuredOutputs] | None = None
    ) -> WireGrammar:
        """The grammar for the engine. ApiError names the field: it cannot be kept to, or breaks a limit.

        make: gives what is to be compiled, where `asked` alone tells it apart from others; called off the event loop.
        """
        key = hashlib.blake2b(repr(asked).encode(errors="replace"), digest_size=16).digest()
        found = self._known(where, key)
        if found is not None:
            return found
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} requests wait for their grammars; try later")
        self._waiting += 1
        try:
            return await in_threads(self._thread, self._compile, key, where, make or (lambda: asked))
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process, whatever it does, and then the thread that waits for it."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _known(self, where: str, key: bytes) -> WireGrammar | None:
        """What has been compiled; what has been refused is refused again."""
        with self._lock:
            if (refused := self._refused.get((where, key))) is not None and time.monotonic() < refused[1]:
                raise ApiError(400, refused[0].message, param=refused[0].param)
            return self._cache.get(key)

    def _compile(self, key: bytes, where: str, make: Callable[[], StructuredOutputs]) -> WireGrammar:
        if (found := self._known(where, key)) is not None:
            return found  # it has come while this one waited
        asked, until = make(), time.monotonic() + TOO_LONG_FOR
        try:
            data = self._ask(where, Job(where, asked.kind, getattr(asked, asked.kind), self._options.max_schema_depth))
        except ApiError as error:
            if error.status == 400:
                with self._lock:
                    self._refused.put((where, key), (error, until if error.code == TOO_MUCH else math.inf), 1)
            raise
        found = WireGrammar(key, data, self._vocabulary)
        with self._lock:
            self._cache.put(key, found, len(data))
        return found

    @cached_property
    def _vocabulary(self) -> bytes:
        """The model's tokens, for the other processes. For the thread alone: it imports xgrammar."""
        card = self._card
        return Vocabulary.of(self._tokenizer, card.vocab_size or None, card.eos_token_ids).to_bytes()

    def _ask(self, where: str, job: Job) -> bytes:
        limit = self._options.grammar_timeout
        child = self._running()
        begin = time.monotonic()
        answer = child.ask(msgspec.msgpack.encode(job), limit, MAX_COMPILED + 1)
        if answer is None:
            late = time.monotonic() - begin >= limit
            child.close()
            self._child = None if self._closed else self._start()  # the next need not wait for all of its start
            raise bad(where, f"it takes too much {'time' if late else 'memory'} to compile; make it simpler", TOO_MUCH)
        if answer.startswith(BROKEN):
            logger.error("a grammar cannot be compiled: %s", answer[1:].decode(errors="replace"))
            raise ApiError(500, "The grammar could not be compiled; the server's log says why.", code="internal_error")
        if not answer.startswith(MADE):
            raise ApiError(400, answer[1:].decode(), param=where)
        return answer[1:]

    def _running(self) -> Child:
        """The process, ready for a job."""
        vocabulary, child = self._vocabulary, self._child
        if child is None or not child.alive or not child.ready(vocabulary):
            if child is not None:
                child.close()
            child = self._child = self._start()
            if self._closed or not child.ready(vocabulary):
                raise ApiError(500, "The process for grammars does not start.", code="internal_error")
        return child

    def _start(self) -> Child:
        options = self._options
        path = os.pathsep.join(path for path in sys.path if path)  # it imports what this process would
        return Child(_PROGRAM, (str(options.grammar_memory_mb), str(options.grammar_timeout)), {"PYTHONPATH": path})
