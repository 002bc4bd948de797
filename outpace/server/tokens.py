"""Text and tokens of the HTTP side. Long texts become tokens in threads, so that nobody else waits for them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outpace.errors import InputError
from outpace.server.big_jobs import BigJobs
from outpace.tokenizer import token_texts

_SHORT = 4096  # characters; fewer take about a millisecond, less than the way to a thread and back is worth
_LONG = 1 << 18  # characters; they take turns, since each needs hundreds of times its size meanwhile
_MOST_LONG = 16  # of them may wait, for each key
_THREADS = 4

Result = TypeVar("Result")


async def in_threads(threads: Executor, function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


class Tokens:
    """A tokenizer that never holds the event loop up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._long_texts = BigJobs("long texts", _MOST_LONG)
        self._texts: dict[int, str] = {}
        tokenizer("a")  # forget a truncation that the tokenizer's file may ask for
        self._backend = tokenizer.backend_tokenizer if _is_plain(tokenizer) else None

    async def encode(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Pieces of it become tokens one by one; special ones stand around the first alone."""
        length = sum(map(len, pieces))
        if length < _SHORT:
            return self._encode(pieces, add_special_tokens)
        if length < _LONG:
            return await in_threads(self._threads, self._encode, pieces, add_special_tokens)
        return await self._long_texts.run(self._encode, pieces, add_special_tokens)

    def _encode(self, pieces: Sequence[str], add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            special = add_special_tokens and number == 0
            if self._backend is not None:  # of all its methods only the batched ones let other threads run
                ids += self._backend.encode_batch_fast([piece], add_special_tokens=special)[0].ids
            else:
                ids += self.tokenizer(piece, add_special_tokens=special)["input_ids"]
        return ids

    async def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones too."""
        if len(ids) < _SHORT:
            return self._decode(ids)
        if len(ids) < _LONG:
            return await in_threads(self._threads, self._decode, ids)
        return await self._long_texts.run(self._decode, ids)

    def _decode(self, ids: list[int]) -> str:
        if self._backend is not None and _decodes_plainly(self.tokenizer):
            return str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])  # see `_encode`
        return str(self.tokenizer.decode(ids))

    def texts(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to a text by itself."""
        missing = [token for token in dict.fromkeys(ids) if token not in self._texts]
        if missing:
            self._texts.update(zip(missing, token_texts(self.tokenizer, missing), strict=True))
        return [self._texts[token] for token in ids]

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
    """Whether calling the tokenizer comes down to calling the tokenizers library."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    )


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """The same of decoding."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
