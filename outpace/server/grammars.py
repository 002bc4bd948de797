"""Grammars of requests, compiled in a process of their own and cached."""

import hashlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from transformers import PreTrainedTokenizerBase

from outpace.errors import as_field
from outpace.log import logger
from outpace.server.async_tokenizer import in_threads
from outpace.server.big_jobs import BigJobs
from outpace.server.child import Child, import_path
from outpace.server.compiling import BROKEN, MADE, MAX_ANSWER, CompileJob
from outpace.server.engine import ModelCard
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError, bad
from outpace.structured.check import SchemaCheck
from outpace.structured.grammar_text import GrammarText, grammar_text
from outpace.structured.outputs import StructureCheck, StructuredOutputs
from outpace.structured.sized_cache import SizedCache
from outpace.structured.vocabulary import TokenVocabulary
from outpace.structured.wire import WireGrammar

CHEAP = ("choice", "json_object")  # take no time to write, and always compile
MAX_WAITING = 32  # requests of one caller in the queue
MAX_REFUSED = 1024  # refused grammars that are remembered
TOO_LONG_FOR = 60.0  # seconds for which a grammar that timed out is refused without a new try
TOO_MUCH = "limit_exceeded"
"""Error code of grammars that took too much time or memory; a retry may work."""
_PROGRAM = ("-m", "outpace.server.compiling")
Check = Callable[[str], StructureCheck]
Make = Callable[[], tuple[StructuredOutputs, Check | None]]


class GrammarService:
    """Compiles for one model. The process starts with `start`, or with the first grammar.

    Callers take turns. Cached and cheap grammars do not wait for the process.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, card: ModelCard, options: ServerConfig) -> None:
        self._tokenizer, self._card, self._options = tokenizer, card, options
        self._jobs = BigJobs("of your grammars", MAX_WAITING)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
        self._vocabulary: bytes | None = None  # for the other processes
        self._lock = threading.Lock()  # of the cache
        self._cache: SizedCache[bytes, WireGrammar] = SizedCache(options.grammar_cache_mb * 2**20)
        self._refused: SizedCache[tuple[str, bytes], tuple[ApiError, float]] = SizedCache(MAX_REFUSED)
        self._child: Child | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process ahead of requests, because it takes seconds.

        An error is ignored here: the first grammar meets it again and reports it.
        """
        self._jobs.submit(self._running)

    async def compile(self, where: str, asked: StructuredOutputs, make: Make | None = None) -> WireGrammar:
        """The grammar for the engine. ApiError: it cannot be enforced, or exceeds a limit; names the field.

        make: returns what to compile and the check of answers, if `asked` is only a cache key; called in a thread.
        """
        key = hashlib.blake2b(repr(asked).encode(errors="replace"), digest_size=16).digest()
        found = self._known(where, key)
        if found is not None:
            return found
        with as_field(where, "structured_outputs"):  # the name in errors about the tokenizer or the package
            if asked.kind in CHEAP:
                words: bytes = await in_threads(self._beside, self._words)
                return WireGrammar(key, grammar_text(asked, where).text.encode(), words)
            made = make or (lambda: (asked, None))
            return await self._jobs.run(self._compile, key, where, made)

    def close(self) -> None:
        """Kill the process, then end the thread that waits for it."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        self._jobs.close(wait=True)
        self._beside.shutdown(wait=True, cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def _known(self, where: str, key: bytes) -> WireGrammar | None:
        """The cached grammar, if any. One that was refused before is refused again."""
        with self._lock:
            if (refused := self._refused.get((where, key))) is not None and time.monotonic() < refused[1]:
                raise ApiError(400, refused[0].message, param=refused[0].param)
            return self._cache.get(key)

    def _compile(self, key: bytes, where: str, make: Make) -> WireGrammar:
        if (found := self._known(where, key)) is not None:
            return found  # another request compiled it meanwhile
        (asked, check), until = make(), time.monotonic() + TOO_LONG_FOR
        fields = {asked.kind: getattr(asked, asked.kind), "disable_any_whitespace": asked.disable_any_whitespace}
        try:
            made = self._ask(where, CompileJob(where, fields, self._options.max_schema_depth))
            if made.later and isinstance(asked.json, str):
                check = SchemaCheck(asked.json, made.later, where)
        except ApiError as error:
            if error.status == 400:
                with self._lock:
                    self._refused.put((where, key), (error, until if error.code == TOO_MUCH else math.inf), 1)
            raise
        found = WireGrammar(key, made.text.encode(), self._words(), check)
        with self._lock:
            self._cache.put(key, found, len(found.data))
        return found

    def _words(self) -> bytes:
        """The model's tokens. The first call takes tenths of a second."""
        if self._vocabulary is None:
            card = self._card
            self._vocabulary = TokenVocabulary.of(
                self._tokenizer, card.vocab_size or None, card.eos_token_ids
            ).to_bytes()
        return self._vocabulary

    def _ask(self, where: str, job: CompileJob) -> GrammarText:
        limit = self._options.grammar_timeout
        child = self._running()
        begin = time.monotonic()
        answer = child.ask(msgspec.msgpack.encode(job), limit, MAX_ANSWER + 1)
        if answer is None:
            late = time.monotonic() - begin >= limit
            child.close()
            self._child = None if self._closed else self._start()  # starts now, before the next grammar comes
            raise bad(where, f"it takes too much {'time' if late else 'memory'} to compile; make it simpler", TOO_MUCH)
        if answer.startswith(BROKEN):
            logger.error("a grammar cannot be compiled: %s", answer[1:].decode(errors="replace"))
            raise ApiError(500, "The grammar could not be compiled; the server's log says why.", code="internal_error")
        if not answer.startswith(MADE):
            raise ApiError(400, answer[1:].decode(), param=where)
        return msgspec.msgpack.decode(answer[1:], type=GrammarText)

    def _running(self) -> Child:
        """The process, started and ready for a job."""
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
        limits = str(options.grammar_memory_mb), str(options.grammar_timeout)
        return Child(_PROGRAM, limits, {"PYTHONPATH": import_path()})
