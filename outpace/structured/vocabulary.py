"""The tokens of a model for llguidance. transformers is imported late: the compiling process does not need it."""

import copy
import json
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from outpace.errors import NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def llguidance() -> ModuleType:
    """The library. NotSupported says how to install it."""
    try:
        import llguidance as found
    except ImportError:
        raise NotSupported("structured_outputs: llguidance is missing; pip install 'outpace[structured]'") from None
    return found


class TokenVocabulary:
    """The tokenizer of a model, in the file format of the tokenizers library, with size and end tokens of the model."""

    def __init__(self, text: str, vocab_size: int | None, stop_token_ids: Sequence[int]) -> None:
        self._text, self._vocab_size, self._stops = text, vocab_size, tuple(stop_token_ids)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None, stop_token_ids: Sequence[int]) -> Self:
        """The vocabulary of a tokenizer. vocab_size: the width of the model's logits."""
        from transformers import PreTrainedTokenizerFast

        llguidance()  # report a missing library first
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            kind = type(tokenizer).__name__
            raise NotSupported(f"structured_outputs: expected a tokenizer of the tokenizers library, got a {kind}")
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        size = None if vocab_size is None else max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return cls(backend.to_str(), size, stop_token_ids)

    @classmethod
    def of_bytes(cls, data: bytes) -> Self:
        """The reverse of `to_bytes`."""
        head, _, text = data.decode().partition("\n")
        vocab_size, stops = json.loads(head)
        return cls(text, vocab_size, stops)

    def to_bytes(self) -> bytes:
        """For another process."""
        return f"{json.dumps([self._vocab_size, self._stops])}\n{self._text}".encode()

    @cached_property
    def tokenizer(self) -> Any:
        """llguidance's own tokenizer. The first use takes tenths of a second."""
        try:
            return llguidance().LLTokenizer(self._text, n_vocab=self._vocab_size, eos_token=list(self._stops) or None)
        except ValueError as error:
            why = str(error).strip().splitlines()
            raise NotSupported(
                f"structured_outputs: llguidance cannot read the tokenizer ({why[0][:200] if why else error!r})"
            ) from None

    @property
    def size(self) -> int:
        """Number of bits of a mask."""
        return int(self.tokenizer.vocab_size)

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer for llguidance."""
        return tuple(self.tokenizer.eos_tokens)

    @cached_property
    def lengths(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Bytes of each token without white space around it; 0 for tokens that end answers."""
        found = np.array([len(self.tokenizer.decode_bytes([token]).strip()) for token in range(self.size)])
        found[list(self.end_token_ids)] = 0
        return found
