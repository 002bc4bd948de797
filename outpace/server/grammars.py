"""Grammars of requests, compiled off the event loop in a process of their own, and kept."""

import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from transformers import PreTrainedTokenizerBase

from outpace.log import logger
from outpace.server.big_jobs import BigJobs
from outpace.server.child import Child
from outpace.server.compiling import BROKEN, MADE, MAX_ANSWER, Job, Made
from outpace.server.engine import ModelCard, WireGrammar
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError, bad
from outpace.server.tokens import in_threads
from outpace.structure import StructureCheck, StructuredOutputs
from outpace.structured.cache import SizedCache
from outpace.structured.check import SchemaCheck
from outpace.structured.prepare import prepare
from outpace.structured.vocabulary import Vocabulary

CHEAP = ("choice", "json_object")  # they are written down in no time, and always compile
MAX_WAITING = 32  # requests of one caller that wait for the process
MAX_REFUSED = 1024  # of those that are remembered
TOO_LONG_FOR = 60.0  # seconds for which one that took too long is refused at once
TOO_MUCH = "limit_exceeded"
"""The code of grammars that took too much time or memory: another time they may not."""
_PROGRAM = ("-m", "outpace.server.compiling")
Check = Callable[[str], StructureCheck]
Make = Callable[[], tuple[StructuredOutputs, Check | None]]


class Grammars:
    """Compiles for one model. The process is there from `start` on, or from the first grammar.

    Callers take turns at it. What is cached, and what is cheap, does not wait for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, card: ModelCard, options: ServerConfig) -> None:
        self._tokenizer, self._card, self._options = tokenizer, card, options
        self._jobs = BigJobs("of your grammars", MAX_WAITING)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
        self._vocabulary: bytes | None = None  # the model's tokens, for the other processes
        self._lock = threading.Lock()  # of the cache
        self._cache: SizedCache[bytes, WireGrammar] = SizedCache(options.grammar_cache_mb * 2**20)
        self._refused: SizedCache[tuple[str, bytes], tuple[ApiError, float]] = SizedCache(MAX_REFUSED)
        self._child: Child | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process, which takes seconds, and more on a busy machine: no request need wait for it.

        What fails here fails again when a grammar comes, and is reported then.
        """
        self._jobs.submit(self._running)

    async def compile(self, where: str, asked: StructuredOutputs, make: Make | None = None) -> WireGrammar:
        """The grammar for the engine. ApiError names the field: it cannot be kept to, or breaks a limit.

        make: gives what is to be compiled, and the check of answers, where `asked` only identifies it; called off the
        event loop.
        """
        key = hashlib.blake2b(repr(asked).encode(errors="replace"), digest_size=16).digest()
        found = self._known(where, key)
        if found is not None:
            return found
        if asked.kind in CHEAP:
            words: bytes = await in_threads(self._beside, self._words)
            return WireGrammar(key, prepare(asked, where).grammar.encode(), words)
        made = make or (lambda: (asked, None))
        return await self._jobs.run(self._compile, key, where, made)

    def close(self) -> None:
        """End the process, whatever it does, and then the thread that waits for it."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        self._jobs.close(wait=True)
        self._beside.shutdown(wait=True, cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _known(self, where: str, key: bytes) -> WireGrammar | None:
        """What has been compiled; what has been refused is refused again."""
        with self._lock:
            if (refused := self._refused.get((where, key))) is not None and time.monotonic() < refused[1]:
                raise ApiError(400, refused[0].message, param=refused[0].param)
            return self._cache.get(key)

    def _compile(self, key: bytes, where: str, make: Make) -> WireGrammar:
        if (found := self._known(where, key)) is not None:
            return found  # it has come while this one waited
        (asked, check), until = make(), time.monotonic() + TOO_LONG_FOR
        value, compact = getattr(asked, asked.kind), asked.disable_any_whitespace
        try:
            made = self._ask(where, Job(where, asked.kind, value, compact, self._options.max_schema_depth))
            if made.later and asked.kind == "json":
                check = SchemaCheck(value, made.later, where)
        except ApiError as error:
            if error.status == 400:
                with self._lock:
                    self._refused.put((where, key), (error, until if error.code == TOO_MUCH else math.inf), 1)
            raise
        found = WireGrammar(key, made.grammar, self._words(), check)
        with self._lock:
            self._cache.put(key, found, len(made.grammar))
        return found

    def _words(self) -> bytes:
        """The model's tokens. Takes tenths of a second once."""
        if self._vocabulary is None:
            card = self._card
            self._vocabulary = Vocabulary.of(self._tokenizer, card.vocab_size or None, card.eos_token_ids).to_bytes()
        return self._vocabulary

    def _ask(self, where: str, job: Job) -> Made:
        limit = self._options.grammar_timeout
        child = self._running()
        begin = time.monotonic()
        answer = child.ask(msgspec.msgpack.encode(job), limit, MAX_ANSWER + 1)
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
        return msgspec.msgpack.decode(answer[1:], type=Made)

    def _running(self) -> Child:
        """The process, ready for a job."""
        vocabulary, child = self._words(), self._child
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
