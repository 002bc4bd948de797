"""Which grammars an engine process knows: the HTTP side teaches it each one once, and says which it may forget."""

from collections.abc import Iterator

from outpace.errors import InputError
from outpace.log import logger
from outpace.server.engine import WireGrammar
from outpace.server.messages import Learn, Unlearn
from outpace.structured.cache import SizedCache
from outpace.structured.compile import CompiledGrammar, memory_of
from outpace.structured.vocabulary import Vocabulary

MAX_BYTES = 64 * 2**20  # of compiled grammars that an engine process is to know


class Taught:
    """What one engine process has been told, on the HTTP side."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._keys: SizedCache[bytes, bool] = SizedCache(max_bytes)
        self._begun = False

    def before(self, grammar: WireGrammar | None) -> Iterator[Learn | Unlearn]:
        """What to send before a request that is held to this grammar."""
        if grammar is None or self._keys.get(grammar.key):
            return
        yield Learn(grammar.key, grammar.data, b"" if self._begun else grammar.vocabulary)
        self._begun = True
        for key in self._keys.put(grammar.key, True, memory_of(grammar.data)):
            yield Unlearn(key)


class Learned:
    """The same in the engine process. Requests that run keep theirs."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._found: dict[bytes, CompiledGrammar | None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def take(self, message: Learn | Unlearn) -> None:
        """Learn or forget; a grammar that cannot be read fails the requests that name it."""
        if isinstance(message, Unlearn):
            self._found.pop(message.key, None)
            return
        self._found[message.key] = None
        try:
            if message.vocabulary:
                self._vocabulary = Vocabulary.of_bytes(message.vocabulary)
            assert self._vocabulary is not None, "it comes with the first grammar"
            self._found[message.key] = CompiledGrammar.of_bytes(message.data, self._vocabulary)
        except Exception:
            logger.exception("a grammar cannot be read")

    def get(self, key: bytes) -> CompiledGrammar | None:
        """The grammar of that key; none for no key."""
        if not key:
            return None
        found = self._found.get(key)
        if found is None:
            raise InputError("structured_outputs: the engine could not read the grammar")
        return found
