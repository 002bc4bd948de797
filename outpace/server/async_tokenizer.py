"""AsyncTokenizer: text to tokens and back in the HTTP process. Long texts are tokenized in threads, so that other
requests do not wait for them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outpace.errors import InputError
from outpace.server.big_jobs import BigJobs
from outpace.server.fields import pieces
from outpace.tokenizer import token_texts

_SHORT = 4096  # characters; shorter texts take about a millisecond, less than a thread would cost
_LONG = 1 << 18  # characters; longer texts are tokenized one at a time: each needs hundreds of times its size
_MOST_LONG = 16  # long texts of one API key that may wait
_THREADS = 4
_INFO = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "errors"),
    *("padding_side", "split_special_tokens", "truncation_side"),
)
"""Entries of tokenizer_config.json that say how texts become tokens."""

Result = TypeVar("Result")


async def in_threads(threads: Executor, function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


class AsyncTokenizer:
    """A tokenizer that never blocks the event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._long_texts = BigJobs("long texts", _MOST_LONG)
        self._texts: dict[int, str] = {}
        tokenizer("a")  # turns off a truncation that the tokenizer's file may set
        self._backend = tokenizer.backend_tokenizer if _is_plain(tokenizer) else None

    async def encode(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Each piece is tokenized separately; special tokens are added only around the first."""
        return await self._call(sum(map(len, pieces)), self._encode, pieces, add_special_tokens)

    async def _call(self, length: int, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function here, in one of the threads, or after other long texts: the length of its text decides."""
        if length < _SHORT:
            return function(*arguments)
        if length < _LONG:
            return await in_threads(self._threads, function, *arguments)
        return await self._long_texts.run(function, *arguments)

    def _encode(self, pieces: Sequence[str], add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            special = add_special_tokens and number == 0
            if self._backend is not None:  # only its batched methods release the GIL
                ids += self._backend.encode_batch_fast([piece], add_special_tokens=special)[0].ids
            else:
                ids += self.tokenizer(piece, add_special_tokens=special)["input_ids"]
        return ids

    async def decode(self, ids: list[int]) -> str:
        """The text of tokens, including special tokens."""
        return await self._call(len(ids), self._decode, ids)

    def _decode(self, ids: list[int]) -> str:
        if self._backend is not None and _decodes_plainly(self.tokenizer):
            return str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])  # see `_encode`
        return str(self.tokenizer.decode(ids))

    def names(self, ids: list[int]) -> list[str]:
        """The tokens as they are written in the vocabulary."""
        return [str(name) for name in self.tokenizer.convert_ids_to_tokens(ids)]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        missing = list({token for piece in pieces(ids) for token in set(piece)} - self._texts.keys())
        if missing:
            self._texts.update(zip(missing, token_texts(self.tokenizer, missing), strict=True))
        return [self._texts[token] for token in ids]

    def info(self, max_model_len: int, chat_template: str | None) -> dict[str, Any]:
        """The content of tokenizer_config.json without paths, for clients that tokenize themselves."""
        tokenizer = self.tokenizer
        given = {name: value for name in _INFO if isinstance(value := tokenizer.init_kwargs.get(name), bool | str)}
        added = {
            str(number): {"content": token.content, "special": token.special}
            for number, token in tokenizer.added_tokens_decoder.items()
        }
        specials = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        return {
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
            **given,
            **specials,
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": max_model_len,
            "added_tokens_decoder": added,
            "chat_template": chat_template,
        }

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, with and without a space before it: both forms occur inside a text."""
        forms: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(self._encode([text], False))
                if not ids:
                    raise InputError(f"bad_words: {word!r:.40} has no tokens")
                forms[ids] = None
        return tuple(forms)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_texts.close()


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether calling the tokenizer only calls the tokenizers library."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    )


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decoding only calls the tokenizers library."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
