"""Text from tokens as they come: incremental detokenization and stop strings.

`tokenizers.DecodeStream` takes half the time for each token, but raises an error after a bad byte-fallback token,
repeats the prompt if that ends inside a character, and holds back bytes that can never be text.
"""

import codecs
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_UNFINISHED = "\ufffd"  # a tokenizer decodes a part of a multi-byte character to this
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte-fallback token
_SHORTEST_CONTEXT = 4  # least number of earlier tokens that are decoded again with new ones
_LONGEST_WINDOW = 12  # most tokens that are decoded together, if the text allows it
_LONGEST_WAIT = 32  # most byte-fallback tokens in a row that are held back


class Detokenizer:
    """Turns a growing list of tokens into text. Text once shown is never taken back.

    After `finish` the text is `tokenizer.decode` of all tokens, up to the first stop string, however often it was read
    before. Text is held back while later tokens can change it: a character until its last byte (one that can never be
    finished becomes U+FFFD with the next token), spaces that `clean_up_tokenization_spaces` may remove, and
    byte-fallback tokens ("<0x0A>") until another token follows, because one bad byte turns all its neighbours into
    U+FFFD. At most 32 of those are held back; a later bad byte does not change what was shown.

    With `prompt_token_ids` the text is what the tokens add after the prompt: the first word gets the space that
    tokenizers with word-start marks omit at the beginning of a text. A character that the prompt began counts as the
    answer's.

    A tokenizer that changes earlier text in other ways (its own `clean_up_tokenization`, merged repetitions as for
    speech, patterns across tokens) cannot be followed exactly: a read then returns the characters after as many as were
    shown before.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool,
        stop: Sequence[str],
        include_stop_str_in_output: bool = False,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._window = _Window(_Decoder(tokenizer, skip_special_tokens), prompt_token_ids)
        self._stops = _StopStrings(stop, include_stop_str_in_output) if stop else None
        self._read = 0  # tokens up to here are in the window
        self._taken: list[str] = []  # parts of the text that `take` has returned
        self._fresh: list[str] = []  # parts that it has not returned yet
        self._finished = False
        self._lock = threading.RLock()  # one thread may add tokens while another reads
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        with self._lock:
            self._catch_up()
            self._taken, self._fresh = ["".join(self._taken)], ["".join(self._fresh)]
            return self._taken[0] + self._fresh[0]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared. The text ends before it (or after it), whatever is added."""
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.found

    def add(self, token: int) -> None:
        """Add a token. Its text is made at the next read, or now if there are stop strings."""
        self.token_ids.append(token)
        if self._stops is not None:
            with self._lock:
                self._catch_up()

    def take(self) -> str:
        """The text since the last `take`."""
        with self._lock:
            self._catch_up()
            part = "".join(self._fresh)
            self._fresh.clear()
            if part:
                self._taken.append(part)
            return part

    def finish(self) -> None:
        """Release text that is held back: an unfinished character, the beginning of a stop string."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self._catch_up(last=True)

    def _catch_up(self, last: bool = False) -> None:
        if self.stopped or (self._read == len(self.token_ids) and not last):
            return
        new = self.token_ids[self._read :]
        self._read += len(new)
        settled, tentative = self._window.read(new, last)
        self._fresh.append(settled if self._stops is None else self._stops.let_pass(settled, tentative, last))


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token alone, with its space: U+FFFD for a part of a character."""
    decode = _Decoder(tokenizer, skip_special_tokens=False).decode
    texts: dict[int, str] = {}
    for token in set(ids):
        alone = decode([token])  # at the beginning of a text, where some tokenizers omit the space
        texts[token] = alone if _UNFINISHED in alone else decode([token, token])[len(alone) :]
    return [texts[token] for token in ids]


class _Decoder:
    """The tokenizer's `decode`, and which part of its text is final."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._cleans = bool(tokenizer.clean_up_tokenization_spaces)
        self._solid = re.compile(r"[^\s\ufffd'nvr]" if self._cleans else r"[^\s\ufffd]")
        newline = tokenizer.convert_tokens_to_ids("<0x0A>")
        self._byte_fallback = newline is not None and tokenizer.convert_ids_to_tokens(newline) == "<0x0A>"
        self._bytes: dict[int, bytes | None] = {}  # by token: its byte; empty: decode skips it; None: no byte token
        self.decode: Callable[[list[int]], str] = self._fastest()

    def settled(self, tokens: list[int], text: str) -> int:
        """How many characters of the text of these tokens are final, whatever tokens follow."""
        end = len(text)
        if self._byte_fallback:
            if (start := self._open_bytes(tokens)) is not None:
                end = len(self.decode(tokens[:start]))
        elif text.endswith(_UNFINISHED):
            end -= 1  # only the last one: the bytes of one unfinished character are one U+FFFD
        if self._cleans:  # it removes spaces before . ? ! , n't 'm 's 've 're and around '
            solid = len(text[:end].rstrip(" 'nvr"))
            places = (text.find(" ", solid, end), text.find("'", solid, end))
            end = min((place for place in places if place >= 0), default=end)
        return end

    def context(self, tokens: Sequence[int]) -> list[int]:
        """The shortest suffix of these tokens after which later tokens decode as after all of them.

        It must contain a final character that does not depend on earlier text.
        """
        size = _SHORTEST_CONTEXT
        while size < len(tokens):
            some = list(tokens[-size:])
            text = self.decode(some)
            if self._solid.search(text, 0, self.settled(some, text)):
                return some
            size *= 2
        return [token for token in tokens if not self._is_left_out(token)]

    def context_after_bytes(self, tokens: list[int], text: str) -> list[int] | None:
        """The context to continue with if the text ends with too many byte tokens to hold back; None: hold them back.

        These tokens are not in it, so that later bad bytes do not change their text, which is now shown.
        """
        if not self._byte_fallback or len(tokens) <= _LONGEST_WAIT or text.endswith(_UNFINISHED):
            return None
        start = self._open_bytes(tokens)
        if start is None or len(tokens) - start <= _LONGEST_WAIT:
            return None
        before = self.context(tokens[:start])
        return before if self._solid.search(self.decode(before)) else tokens[-len(text[-1:].encode()) :]

    def _fastest(self) -> Callable[[list[int]], str]:
        """`tokenizer.decode`, or for most tokenizers the backend's: a third of the time for a few tokens."""
        tokenizer, kind = self._tokenizer, type(self._tokenizer)
        if (
            isinstance(tokenizer, PreTrainedTokenizerFast)
            and kind.decode is PreTrainedTokenizerBase.decode
            and kind._decode is PreTrainedTokenizerFast._decode
            and not self._cleans
        ):
            return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=self._skip)
        return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def _open_bytes(self, tokens: list[int]) -> int | None:
        """Where the byte tokens at the end begin, if they are valid so far.

        The tokenizer decodes neighbouring byte tokens together if all are valid, and else as one U+FFFD each.
        """
        start, backwards = None, bytearray()
        for place in range(len(tokens) - 1, -1, -1):
            token = tokens[place]
            if token not in self._bytes:
                self._bytes[token] = b"" if self._is_left_out(token) else self._byte_of(token)
            byte = self._bytes[token]
            if byte is None:
                break
            if byte:
                start = place
                backwards += byte
        return start if _may_become_text(bytes(reversed(backwards))) else None

    def _byte_of(self, token: int) -> bytes | None:
        match = _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token)))
        return None if match is None else bytes.fromhex(match[1])

    def _is_left_out(self, token: int) -> bool:
        """Whether decode skips this token. (A space at the beginning of a text shows nothing, but is not skipped.)"""
        if self.decode([token]):
            return False
        known = self._tokenizer.convert_ids_to_tokens(token) is not None
        return not known or (self._skip and bool(self._tokenizer.decode([token], skip_special_tokens=False)))


class _Window:
    """The last tokens, decoded again together with new ones, because text depends on earlier tokens."""

    def __init__(self, decoder: _Decoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        self._tokens = decoder.context(prompt)
        self._before = decoder.decode(self._tokens)  # text of the window that was read before
        self._limit = max(_LONGEST_WINDOW, 2 * len(self._tokens))

    def read(self, tokens: list[int], last: bool) -> tuple[str, str]:
        """The final text that these tokens add, and the tentative text after it."""
        self._tokens += tokens
        now = self._decoder.decode(self._tokens)
        begin = len(self._before) if now.startswith(self._before) else _end_of(self._before, now)
        if last:
            return now[begin:], ""
        end = self._decoder.settled(self._tokens, now)
        if (context := self._decoder.context_after_bytes(self._tokens, now)) is not None:
            self._tokens, self._before = context, self._decoder.decode(context)
            return now[begin:], ""
        if end > begin:
            self._before = now[:end]
        if len(self._tokens) > self._limit and end == len(self._before):
            self._shorten()
        return now[begin:end], now[max(begin, end) :].rstrip(_UNFINISHED)

    def _shorten(self) -> None:
        self._tokens = self._decoder.context(self._tokens)
        text = self._decoder.decode(self._tokens)
        self._before = text[: self._decoder.settled(self._tokens, text)]
        self._limit = max(_LONGEST_WINDOW, 2 * len(self._tokens))


class _StopStrings:
    """Ends a text at the first of several strings. Holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        assert all(stops), "an empty stop string"
        self._searches = [_Search(stop) for stop in stops]
        self._beginnings = re.compile("|".join(re.escape(stop[0]) for stop in stops))
        self._include = include
        self._held = ""
        self.found: str | None = None

    def let_pass(self, settled: str, tentative: str, last: bool) -> str:
        """The text that may be shown now. A stop string in tentative text counts: the answer ends there, so no later
        token can change it."""
        if not self._held and self._beginnings.search(settled + tentative) is None:
            return settled
        found: list[tuple[int, int, str]] = []  # start, end, string: the smallest is the first to appear
        for search in self._searches:
            end = search.read(settled, tentative)
            if end is not None:
                found.append((end - len(search.string), end, search.string))
        text = self._held + settled
        if found:
            start, end, self.found = min(found)
            return (text + tentative)[: len(self._held) + (end if self._include else start)]
        ready = len(text) if last else len(text) - max(search.begun for search in self._searches)
        self._held = text[ready:]
        return text[:ready]


class _Search:
    """Searches one string in a text that comes in pieces (Knuth, Morris, Pratt): reads each character once."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.begun = 0  # this many characters at the end of the text are the beginning of the string

    def read(self, piece: str, tentative: str) -> int | None:
        """Where the string ends in the piece; None: it is not there. Tentative text is not remembered."""
        end, self.begun = self._find(piece, self.begun)
        if end is None and tentative:
            end, _ = self._find(tentative, self.begun)
            return None if end is None else len(piece) + end
        return end

    def _find(self, piece: str, begun: int) -> tuple[int | None, int]:
        string, place = self.string, 0
        while True:
            if begun == 0:
                place = piece.find(string[0], place)
            if place < 0 or place == len(piece):
                return None, begun
            while begun and string[begun] != piece[place]:
                begun = _borders(string)[begun]
            begun += string[begun] == piece[place]
            place += 1
            if begun == len(string):
                return place, begun


@lru_cache(maxsize=64)
def _borders(string: str) -> tuple[int, ...]:
    """For each length, the longest shorter beginning of the string that also ends its beginning of that length."""
    borders = [0, 0]
    for letter in string[1:]:
        border = borders[-1]
        while border and string[border] != letter:
            border = borders[border]
        borders.append(border + (string[border] == letter))
    return tuple(borders)


def _end_of(before: str, now: str) -> int:
    """Where the earlier text ends in the new text, if the earlier text has changed a little.

    This happens directly after a prompt: its unfinished last character is completed, or cleanup removes its spaces.
    """
    while before.endswith(_UNFINISHED):
        before = before[:-1]
        if now.startswith(before):
            return len(before)
    ends = [0, *(place for place, letter in enumerate(now, 1) if letter != " ")]
    return ends[min(len(before.replace(" ", "")), len(ends) - 1)]


def _may_become_text(data: bytes) -> bool:
    """Whether it is valid UTF-8, or can become so with more bytes."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True
