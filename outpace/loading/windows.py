"""Tokenizes a text and cuts it into windows that fit a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from outpace.errors import InputError


@dataclass(frozen=True)
class TextTokens:
    """A tokenized text."""

    ids: list[int]
    """Without special tokens."""
    prefix: list[int]
    """Special tokens that the tokenizer puts before a text (BOS); each window starts with them."""
    num_bytes: int | None
    """Bytes of the text in UTF-8; None: unknown."""

    def of(self, window: "Window") -> list[int]:
        """The tokens of a window, special ones first."""
        return self.prefix + self.ids[window.begin : window.end]


@dataclass(frozen=True)
class Window:
    """A piece of the text for one pass of the model."""

    begin: int
    end: int
    """Begin and end in the text, in tokens."""
    first: int
    """Position in the window, including special tokens, of the first token that counts; earlier ones are context."""
    place: int
    """Index of that token among all tokens that count."""
    tokens: int
    """Number of tokens that count."""


def read_tokens(
    tokenizer: PreTrainedTokenizerBase | None, text: str | Sequence[int], max_tokens: int | None
) -> TextTokens:
    """The tokens of a text, at most `max_tokens`; token ids are used as they are."""
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 2):
        raise InputError(f"max_tokens: expected an integer from 2, got {max_tokens!r}")
    if not isinstance(text, str):
        return TextTokens(_checked(text)[:max_tokens], [], None)
    if tokenizer is None:
        raise InputError("text: the model has no tokenizer; pass token ids, or a tokenizer")
    if not text.strip():
        raise InputError("text: it is empty; give some sentences, or remove it for the built-in text")
    try:
        plain = _encode(tokenizer, text, add_special_tokens=False)
        prefix = _prefix(_encode(tokenizer, text), plain)
    except (TypeError, ValueError) as error:  # for example a lone surrogate
        raise InputError(f"text: the tokenizer cannot read it ({error})") from error
    ids = plain[:max_tokens]
    used = text if len(ids) == len(plain) else tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return TextTokens(ids, prefix, len(str(used).encode()))


def make_windows(tokens: TextTokens, window: int, stride: int | None = None) -> list[Window]:
    """Windows of at most `window` tokens, including special ones, that start every `stride` tokens of the text.

    Each token counts once, in its first window. Without special tokens, the first token of the text, and of windows
    that do not overlap, has no context and does not count.
    """
    stride = check_window(window, stride, len(tokens.prefix))
    room, found, seen, place = window - len(tokens.prefix), list[Window](), 0, 0
    for begin in range(0, len(tokens.ids), stride):
        end = min(begin + room, len(tokens.ids))
        first = max(seen, begin if tokens.prefix else begin + 1)
        if first < end:
            found.append(Window(begin, end, len(tokens.prefix) + first - begin, place, end - first))
            place, seen = place + end - first, end
        if end == len(tokens.ids):
            break
    if not found:
        raise InputError(f"text: {len(tokens.ids)} tokens are too few to predict any; give a longer text")
    return found


def check_window(window: int, stride: int | None, num_prefix: int = 0) -> int:
    """Check window and stride; returns the stride."""
    least = 1 + max(1, num_prefix)
    if type(window) is not int or window < least:
        raise InputError(f"window: expected an integer from {least} (context and a token to predict), got {window!r}")
    room = window - num_prefix
    if stride is None:
        return room
    if type(stride) is not int or not 1 <= stride <= room:
        raise InputError(f"stride: expected 1 to {room} with window={window}, got {stride!r}")
    return stride


def _checked(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"text: expected text or token ids that are not empty, got {ids!r:.80}")
    return list(ids)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> list[int]:
    found: Any = tokenizer(text, verbose=False, **options)["input_ids"]  # no warning about the length
    return [int(token) for token in found]


def _prefix(full: list[int], plain: list[int]) -> list[int]:
    """The special tokens before the text, without those after it."""
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []
