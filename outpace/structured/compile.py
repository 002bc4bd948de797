"""StructuredOutputs compiled for a model's tokens, and the matchers that follow answers."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from outpace.errors import InputError
from outpace.structure import StructuredOutputs
from outpace.structured.cache import SizedCache
from outpace.structured.prepare import prepare
from outpace.structured.schema import MAX_DEPTH
from outpace.structured.vocabulary import Vocabulary, llguidance

CACHE_BYTES = 64 * 2**20  # of compiled grammars that a process keeps
MAX_LEXER_STATES = 50_000  # of one answer, about 1.5 kB each
TRIED = 32  # tokens of each answer that is made to see how long they take
MAX_SECONDS = 0.002
"""CPU time that a token may take: longer, and other requests would wait for it."""
WALKS = (8, 1, 64)
"""How many tokens are drawn, of which the longest is taken: so that probes do not produce only white space."""
_WORD = 32  # tokens of an int32

Masks = np.ndarray[Any, np.dtype[np.int32]]


def memory_of(data: bytes) -> int:
    """About what a grammar of this text takes when it is compiled: 27 times its text for 1,500 properties."""
    return 2**14 + 32 * len(data)


class Matcher:
    """Follows one answer."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, stop_token_ids: Sequence[int]) -> None:
        self._matcher, self._vocabulary, self._stops = matcher, vocabulary, tuple(stop_token_ids)
        self._words = -(-vocabulary.size // _WORD)
        self._ended = False

    def accept(self, token_id: int) -> bool:
        """Take a token in; False: it cannot stand here."""
        if self._ended:
            return token_id in self._stops
        if token_id in self._stops and self._matcher.is_accepting():
            self._ended = True
            return True
        return bool(self._matcher.consume_token(token_id))

    def fill(self, masks: Masks, row: int) -> None:
        """Set the bits of the tokens that may come next. After the end that is the end again: an answer that must
        go on, for `min_tokens` say, says nothing more. No bits: the grammar became too complex to go on with."""
        if self._ended:
            masks[row] = 0
            _set(masks[row], self._stops)
            return
        fits = masks.shape[1] == self._words  # otherwise the model has fewer tokens than the tokenizer, or more
        found = masks[row] if fits else np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        if self._matcher.is_error():
            masks[row] = 0
            return
        _clear(found, self._vocabulary.end_token_ids)
        if not fits:
            shared = min(len(found), masks.shape[1])
            masks[row] = 0
            masks[row, :shared] = found[:shared]
        if self._matcher.is_accepting():
            _set(masks[row], self._stops)


def _set(mask: Masks, tokens: Sequence[int]) -> None:
    for token in tokens:
        mask.view(np.uint32)[token // _WORD] |= np.uint32(1 << token % _WORD)


def _clear(mask: Masks, tokens: Sequence[int]) -> None:
    for token in tokens:
        mask.view(np.uint32)[token // _WORD] &= np.uint32(~(1 << token % _WORD) & 0xFFFFFFFF)


class CompiledGrammar:
    """A grammar for the tokens of one model. InputError: it is not one, and why."""

    def __init__(self, text: str, vocabulary: Vocabulary, later: tuple[str, ...] = ()) -> None:
        self._text, self._vocabulary = text, vocabulary
        self.later = later
        """Keywords of the schema that it does not enforce, with their places."""
        library = llguidance()
        limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = library.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise InputError(_plain(self._matcher.get_error()))

    @classmethod
    def of_bytes(cls, data: bytes, vocabulary: Vocabulary) -> Self:
        """What `to_bytes` has made with the same vocabulary."""
        return cls(data.decode(), vocabulary)

    def to_bytes(self) -> bytes:
        """For another process; the vocabulary is not in it."""
        return self._text.encode()

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self._vocabulary.size

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        """For a new answer, which one of these tokens ends."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, stop_token_ids)


class Compiler:
    """Compiles for one vocabulary, and keeps what it has compiled. For any thread."""

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._cache: SizedCache[StructuredOutputs, CompiledGrammar] = SizedCache(cache_bytes)

    def compile(
        self, asked: StructuredOutputs, where: str | None = None, max_depth: int = MAX_DEPTH
    ) -> CompiledGrammar:
        """A grammar that holds answers to what is asked. InputError: it cannot be kept to, and why.

        where: what the caller calls it; max_depth: of schemas.
        """
        name = where or f"structured_outputs.{asked.kind}"
        with self._lock:
            found = self._cache.get(asked)
            if found is None:
                prepared = prepare(asked, name, max_depth)
                try:
                    found = CompiledGrammar(prepared.grammar, self._vocabulary, prepared.later)
                except InputError as error:
                    raise InputError(f"{name}: {error}") from None
                self._try_out(found, name)
                self._cache.put(asked, found, memory_of(found.to_bytes()))
            return found

    def _try_out(self, grammar: CompiledGrammar, name: str) -> None:
        """Make the beginnings of some answers. InputError: there are none, or they take too long."""
        for seed, drawn in enumerate(WALKS):
            took = self._seconds_each(grammar, name, np.random.default_rng(seed), drawn)
            if took > MAX_SECONDS:
                raise InputError(
                    f"{name}: it takes {1e3 * took:.1f} ms to choose each token by it; "
                    "make it simpler: repetitions in repetitions, or many optional parts, cost most"
                )

    def _seconds_each(self, grammar: CompiledGrammar, name: str, draw: np.random.Generator, drawn: int) -> float:
        """What each token of a random answer takes; one that ends soon counts as if its other tokens took no time."""
        masks = np.zeros((1, -(-grammar.vocab_size // _WORD)), dtype=np.int32)
        ends = self._vocabulary.end_token_ids
        matcher, spent, steps = grammar.matcher(ends), 0.0, 0
        while steps < TRIED and spent < 2 * TRIED * MAX_SECONDS:
            begin = time.thread_time()
            matcher.fill(masks, 0)
            spent, steps = spent + time.thread_time() - begin, steps + 1
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")[: grammar.vocab_size])
            if not len(allowed):
                raise InputError(f"{name}: {_dead_end(steps)}")
            some = allowed[draw.integers(len(allowed), size=drawn)]
            token = int(some[self._vocabulary.lengths[some].argmax()])
            if token in ends or not matcher.accept(token):
                break
        return spent / TRIED


def _dead_end(steps: int) -> str:
    if steps == 1:
        return "no token of this model can begin an answer to it, or it is too complex; make it simpler"
    return "it is too complex, or leads to where no token of this model goes on; make it simpler"


def _plain(error: str) -> str:
    """What llguidance says, in one line."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines or ["it cannot be compiled"])[0][:300]
