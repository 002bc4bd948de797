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
        self._seen = ""  # the text, and behind it what may be the beginning of a stop string
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
        self.text = self._seen

    def _append(self, piece: str) -> None:
        longest = max(map(len, self._stop), default=0)
        start = max(0, len(self._seen) - longest)
        self._seen += piece
        found = [at for stop in self._stop if (at := self._seen.find(stop, start)) >= 0]
        if found:
            self._seen = self._seen[: min(found)]
            self.stopped = True
        self.text = self._seen[: len(self._seen) - (0 if self.stopped else self._held_back())]

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a stop string: shown text is never taken back."""
        begins = (part for stop in self._stop for part in range(1, len(stop)) if self._seen.endswith(stop[:part]))
        return max(begins, default=0)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))
