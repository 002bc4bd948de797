"""StructuredOutputs compiled for a model's tokens, and the matchers that follow answers."""

import json
import re
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from outpace.errors import InputError, NotSupported
from outpace.structure import StructuredOutputs
from outpace.structured.cache import SizedCache
from outpace.structured.regex import checked_regex
from outpace.structured.schema import MAX_DEPTH, MAX_QUICK, checked_schema

CACHE_BYTES = 256 * 2**20  # of compiled grammars that a process keeps
MAX_WHITESPACE = 40  # characters in a row between the parts of JSON: room to indent, and no way to go on for ever
TRIED = 32  # tokens of each answer that is made to see how long they take
MAX_SECONDS = 0.001
"""What a token may take of a processor: longer, and other requests would wait for it."""
WALKS = (8, 1, 64)
"""How many tokens are drawn, of which the longest is taken: white space alone is no way to get on."""
_RAW = r"[^\"\\\r\n]"
"""A character of a string of bounded length, as xgrammar writes it: control characters and surrogates are in it."""
_ALLOWED = r"[ !#-\[\]-\uD7FF\uE000-\U0010FFFF]"
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # where in its source xgrammar found an error


def xgrammar() -> ModuleType:
    """The library, or how to get it."""
    try:
        import xgrammar as found
    except ImportError:
        raise NotSupported("structured_outputs: xgrammar is missing; pip install 'outpace[structured]'") from None
    return found


class Vocabulary:
    """The tokens of a model as xgrammar sees them."""

    def __init__(self, info: Any) -> None:
        self.info = info

    @cached_property
    def lengths(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Bytes of each token, white space around it not counted; those that end answers have none."""
        found = np.array([len(word.strip()) for word in self.info.decoded_vocab])
        found[self.info.stop_token_ids] = 0
        return found

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, stop_token_ids: Sequence[int]) -> Self:
        """Those of a tokenizer. vocab_size: the width of the model's logits."""
        stops = list(stop_token_ids) or None
        try:
            kind = xgrammar().TokenizerInfo
            return cls(kind.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops))
        except (ValueError, RuntimeError, TypeError) as error:
            raise NotSupported(f"structured_outputs: the tokenizer cannot be used for them ({_plain(error)})") from None

    @classmethod
    def of_bytes(cls, data: bytes) -> Self:
        """What `to_bytes` has made."""
        return cls(xgrammar().TokenizerInfo.deserialize_json(data.decode()))

    def to_bytes(self) -> bytes:
        """For another process."""
        return str(self.info.serialize_json()).encode()


class Matcher:
    """Follows one answer."""

    def __init__(self, compiled: Any, stop_token_ids: Sequence[int]) -> None:
        self._stops = list(stop_token_ids)
        self._matcher = xgrammar().GrammarMatcher(compiled, override_stop_tokens=self._stops or None)
        self._ended = False

    def accept(self, token_id: int) -> bool:
        """Take a token in; False: it cannot stand here."""
        if self._ended:
            return token_id in self._stops
        accepted = bool(self._matcher.accept_token(token_id))
        self._ended = accepted and bool(self._matcher.is_terminated())
        return accepted

    def fill(self, masks: "np.ndarray[Any, np.dtype[np.int32]]", row: int) -> None:
        """Set the bits of the tokens that may come next. Behind the end that is the end again: an answer that must
        go on, for `min_tokens` say, says nothing more."""
        if self._ended:
            masks[row] = 0
            for token in self._stops:
                masks.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)
        elif not self._matcher.fill_next_token_bitmask(masks, row):
            masks[row] = -1


class CompiledGrammar:
    """A grammar for the tokens of one model."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    @classmethod
    def of_bytes(cls, data: bytes, vocabulary: Vocabulary) -> Self:
        """What `to_bytes` has made with the same vocabulary."""
        return cls(xgrammar().CompiledGrammar.deserialize_json(data.decode(), vocabulary.info))

    def to_bytes(self) -> bytes:
        """For another process; the vocabulary is not in it."""
        return str(self._compiled.serialize_json()).encode()

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return int(self._compiled.memory_size_bytes)

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return int(self._compiled.tokenizer_info.vocab_size)

    def matcher(self, stop_token_ids: Sequence[int]) -> Matcher:
        """For a new answer, which one of these tokens ends."""
        return Matcher(self._compiled, stop_token_ids)


class Compiler:
    """Compiles for one vocabulary, and keeps what it has compiled. For any thread."""

    def __init__(self, vocabulary: Vocabulary, threads: int = 4, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._compiler = xgrammar().GrammarCompiler(vocabulary.info, max_threads=threads, cache_enabled=False)
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
                    found = CompiledGrammar(_compile(self._compiler, prepared))
                except (ValueError, RuntimeError, TypeError) as error:
                    if "bad_alloc" in str(error):
                        raise MemoryError(f"{name}: it takes too much memory to compile; make it simpler") from None
                    raise InputError(f"{name}: {_plain(error)}") from None
                self._try_out(found, name)
                self._cache.put(asked, found, found.num_bytes)
            return found

    def _try_out(self, grammar: CompiledGrammar, name: str) -> None:
        """Make the beginnings of some answers. InputError: there are none, or they take too long."""
        for seed, drawn in enumerate(WALKS):
            took = self._seconds_each(grammar, name, np.random.default_rng(seed), drawn)
            if took > MAX_SECONDS:
                raise InputError(
                    f"{name}: it takes {1e3 * took:.1f} ms to choose each token by it; "
                    f"make it simpler: characters repeated more than {MAX_QUICK} times, or many choices, cost most"
                )

    def _seconds_each(self, grammar: CompiledGrammar, name: str, draw: np.random.Generator, drawn: int) -> float:
        """What each token of a random answer takes."""
        masks = np.zeros((1, -(-grammar.vocab_size // 32)), dtype=np.int32)
        matcher, spent, steps = grammar.matcher(()), 0.0, 0
        while steps < TRIED and spent < 2 * TRIED * MAX_SECONDS:
            begin = time.thread_time()
            matcher.fill(masks, 0)
            spent, steps = spent + time.thread_time() - begin, steps + 1
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")[: grammar.vocab_size])
            if not len(allowed) and steps == 1:
                raise InputError(f"{name}: no answer of this model's tokens fits it")
            some = allowed[draw.integers(len(allowed), size=drawn)] if len(allowed) else allowed
            if not len(some) or not matcher.accept(int(some[self._vocabulary.lengths[some].argmax()])):
                break
        return spent / steps


def prepare(asked: StructuredOutputs, name: str, max_depth: int = MAX_DEPTH) -> StructuredOutputs:
    """The same, checked and in the form that is compiled. name: what the caller calls it."""
    for text in (asked.json, asked.regex, asked.grammar, *(asked.choice or ())):
        if isinstance(text, str) and not _is_text(text):
            raise InputError(f"{name}: it holds a surrogate, which is no character")
    if isinstance(asked.json, str):
        return StructuredOutputs(json=checked_schema(asked.json, name, max_depth))
    if asked.regex is not None:
        return StructuredOutputs(regex=checked_regex(asked.regex, name))
    return asked


def _compile(compiler: Any, asked: StructuredOutputs) -> Any:
    if asked.regex is not None:
        return compiler.compile_regex(asked.regex)
    if asked.grammar is not None:
        return compiler.compile_grammar(asked.grammar)
    if asked.choice is not None:
        return compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, asked.choice))}")
    if asked.structural_tag is not None:
        return compiler.compile_structural_tag(asked.structural_tag)
    schema = asked.json or '{"type": "object", "additionalProperties": true}'
    if '"minLength"' in schema or '"maxLength"' in schema:
        grammar = str(xgrammar().Grammar.from_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE))
        return compiler.compile_grammar(grammar.replace(_RAW, _ALLOWED))
    return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(error: Exception) -> str:
    """What xgrammar says, without where in its source it says so."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):  # it speaks of one byte of a character
        text = error.object.decode(errors="replace")
    return _PLACE.sub("", text).strip().splitlines()[0][:300] if text.strip() else type(error).__name__
