"""Sends compiled grammars to an engine process: each once, until it must make room for others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from outpace.errors import InputError
from outpace.log import logger
from outpace.structured.compile import CompiledGrammar, memory_of
from outpace.structured.outputs import FIELD, StructureCheck
from outpace.structured.sized_cache import SizedCache
from outpace.structured.vocabulary import TokenVocabulary

MAX_BYTES = 64 * 2**20  # of compiled grammars in an engine process


@dataclass(frozen=True, slots=True)
class WireGrammar:
    """A grammar that a request needs in the engine process."""

    key: bytes
    """Hash of its source."""
    data: bytes = field(repr=False)
    vocabulary: bytes = field(repr=False)
    """The tokens that it was compiled for."""
    check: Callable[[str], StructureCheck] | None = field(default=None, repr=False)
    """Checks finished answers for what the grammar does not enforce; stays on the HTTP side."""


class Learn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep this grammar: requests will name it by its key."""

    key: bytes
    data: bytes
    vocabulary: bytes
    """Sent with the first grammar; empty in later ones."""


class Unlearn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget this grammar: no request will name it again."""

    key: bytes


class SentGrammars:
    """The HTTP side: the grammars that one engine process has."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._keys: SizedCache[bytes, bool] = SizedCache(max_bytes)
        self._sent_vocabulary = False

    def before(self, grammar: WireGrammar | None) -> Iterator[Learn | Unlearn]:
        """The messages to send before a request that needs this grammar."""
        if grammar is None or self._keys.get(grammar.key):
            return
        yield Learn(grammar.key, grammar.data, b"" if self._sent_vocabulary else grammar.vocabulary)
        self._sent_vocabulary = True
        for key in self._keys.put(grammar.key, True, memory_of(grammar.data)):
            yield Unlearn(key)


class ReceivedGrammars:
    """The engine process: the grammars it has received. Running requests keep theirs."""

    def __init__(self) -> None:
        self._vocabulary: TokenVocabulary | None = None
        self._found: dict[bytes, CompiledGrammar | None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def take(self, message: Learn | Unlearn) -> None:
        """Keep or forget a grammar. One that cannot be read fails the requests that name it, not the engine."""
        if isinstance(message, Unlearn):
            self._found.pop(message.key, None)
            return
        self._found[message.key] = None
        try:
            if message.vocabulary:
                self._vocabulary = TokenVocabulary.of_bytes(message.vocabulary)
            assert self._vocabulary is not None, "the first grammar brings it"
            self._found[message.key] = CompiledGrammar(message.data.decode(), self._vocabulary)
        except Exception:
            logger.exception("a grammar cannot be read")

    def get(self, key: bytes) -> CompiledGrammar | None:
        """The grammar of this key; None for an empty key."""
        if not key:
            return None
        found = self._found.get(key)
        if found is None:
            raise InputError(f"{FIELD}: the engine could not read the grammar")
        return found
