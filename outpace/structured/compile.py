"""Grammars compiled for the tokens of a model, and the matchers that follow answers token by token."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.errors import InputError
from outpace.structured.grammar_text import grammar_text
from outpace.structured.outputs import StructuredOutputs
from outpace.structured.schema import MAX_DEPTH
from outpace.structured.sized_cache import SizedCache
from outpace.structured.vocabulary import TokenVocabulary, llguidance

CACHE_BYTES = 64 * 2**20  # of compiled grammars in one process
MAX_LEXER_STATES = 50_000  # of one answer, about 1.5 kB each
TRIED = 32  # tokens of each trial answer
MAX_SECONDS = 0.002
"""CPU time for the mask of one token; a slower grammar is refused, because all requests of a step wait for it."""
WALKS = (8, 1, 64)
"""For each trial answer: how many allowed tokens are drawn, of which the longest is taken. Long tokens are preferred,
so that trials do not produce only white space."""
WORD = 32  # tokens in an int32 of a mask

Masks = np.ndarray[Any, np.dtype[np.int32]]


def memory_of(text: str | bytes) -> int:
    """Estimated bytes of a compiled grammar: it was 27 times its text for a schema of 1,500 properties."""
    return 2**14 + 32 * len(text)


class Matcher:
    """Follows one answer."""

    def __init__(self, matcher: Any, vocabulary: TokenVocabulary, stop_token_ids: Sequence[int]) -> None:
        self._matcher, self._vocabulary, self._stops = matcher, vocabulary, tuple(stop_token_ids)
        self._words = -(-vocabulary.size // WORD)
        self._ended = False

    def accept(self, token_id: int) -> bool:
        """Take in the next token; False: the grammar does not allow it here."""
        if self._ended:
            return token_id in self._stops
        if token_id in self._stops and self._matcher.is_accepting():
            self._ended = True
            return True
        return bool(self._matcher.consume_token(token_id))

    def fill(self, masks: Masks, row: int) -> None:
        """Set the bits of the tokens that may come next, and clear the others. After the end only end tokens may come,
        so `min_tokens` cannot add text. No bits at all: the grammar became too complex to continue."""
        if self._ended:
            masks[row] = 0
            _set(masks[row], self._stops)
            return
        fits = masks.shape[1] == self._words  # a model may have more or fewer tokens than its tokenizer
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
        mask.view(np.uint32)[token // WORD] |= np.uint32(1 << token % WORD)


def _clear(mask: Masks, tokens: Sequence[int]) -> None:
    for token in tokens:
        mask.view(np.uint32)[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)


class CompiledGrammar:
    """A grammar for the tokens of one model. InputError says why it does not compile."""

    def __init__(self, text: str, vocabulary: TokenVocabulary, later: tuple[str, ...] = ()) -> None:
        self.text, self._vocabulary = text, vocabulary
        self.later = later
        """Keywords of the schema that it does not enforce, with their places."""
        library = llguidance()
        limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = library.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise InputError(_plain(self._matcher.get_error()))

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher for a new answer, which ends with one of these tokens."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, stop_token_ids)


class Compiler:
    """Compiles for one vocabulary, with a cache. Thread-safe."""

    def __init__(self, vocabulary: TokenVocabulary, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._cache: SizedCache[StructuredOutputs, CompiledGrammar] = SizedCache(cache_bytes)

    def compile(
        self, asked: StructuredOutputs, where: str | None = None, max_depth: int = MAX_DEPTH
    ) -> CompiledGrammar:
        """The grammar for a request's `structured_outputs`. InputError says why it cannot be enforced.

        where: the caller's name of the field, for errors; max_depth: of schemas.
        """
        name = where or f"structured_outputs.{asked.kind}"
        with self._lock:
            found = self._cache.get(asked)
            if found is None:
                grammar = grammar_text(asked, name, max_depth)
                try:
                    found = CompiledGrammar(grammar.text, self._vocabulary, grammar.later)
                except InputError as error:
                    raise InputError(f"{name}: {error}") from None
                self._try_out(found, name)
                self._cache.put(asked, found, memory_of(found.text))
            return found

    def _try_out(self, grammar: CompiledGrammar, name: str) -> None:
        """Begin a few random answers. InputError: no answer is possible, or the masks take too long."""
        for seed, drawn in enumerate(WALKS):
            took = self._seconds_each(grammar, name, np.random.default_rng(seed), drawn)
            if took > MAX_SECONDS:
                raise InputError(
                    f"{name}: choosing each token takes {1e3 * took:.1f} ms; "
                    "make it simpler: repetitions in repetitions and many optional parts cost most"
                )

    def _seconds_each(self, grammar: CompiledGrammar, name: str, draw: np.random.Generator, drawn: int) -> float:
        """Average seconds for the mask of a token in a random answer. Tokens after an early end count as 0 seconds."""
        size, ends = self._vocabulary.size, self._vocabulary.end_token_ids
        masks = np.zeros((1, -(-size // WORD)), dtype=np.int32)
        matcher, spent, steps = grammar.matcher(ends), 0.0, 0
        while steps < TRIED and spent < 2 * TRIED * MAX_SECONDS:
            begin = time.thread_time()
            matcher.fill(masks, 0)
            spent, steps = spent + time.thread_time() - begin, steps + 1
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")[:size])
            if not len(allowed):
                raise InputError(f"{name}: {_dead_end(steps)}")
            some = allowed[draw.integers(len(allowed), size=drawn)]
            token = int(some[self._vocabulary.lengths[some].argmax()])
            if token in ends or not matcher.accept(token):
                break
        return spent / TRIED


def _dead_end(steps: int) -> str:
    if steps == 1:
        return "no token of this model can begin an answer, or it is too complex; make it simpler"
    return "it is too complex, or an answer can get where no token of this model may follow; make it simpler"


def _plain(error: str) -> str:
    """llguidance's error in one line."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or lines or ["it cannot be compiled"])[0][:300]
