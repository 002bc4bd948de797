"""Text from tokens as they come: incremental detokenization and stop strings."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "�"  # what a tokenizer decodes a part of a multi-byte character to


class Detokenizer:
    """Turns a growing list of tokens into text; a character appears when its last byte is there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop
        self._context = 0  # tokens from here on are decoded again, because text depends on what stands before
        self._done = 0  # tokens up to here are in the text
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        """Take one more token in; `stopped` is set when a stop string appears, and the text ends before it."""
        self.token_ids.append(token)
        before = self._decode(self.token_ids[self._context : self._done])
        now = self._decode(self.token_ids[self._context :])
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            return
        self._append(now[len(before) :])
        self._context, self._done = self._done, len(self.token_ids)

    def finish(self) -> None:
        """Take in what is left, such as a character that was never finished."""
        if not self.stopped:
            before = self._decode(self.token_ids[self._context : self._done])
            self._append(self._decode(self.token_ids[self._context :])[len(before) :])

    def _append(self, piece: str) -> None:
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self.text) - longest)
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))
