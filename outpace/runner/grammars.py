"""Which tokens grammars allow in a step: a matcher for each row that has one, and the way of the masks to the device.

A matcher follows the tokens of its answer one step behind: those that the step before has chosen are read when the
forward of the next one has been launched, so that the device works meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from outpace.log import logger
from outpace.runner.results import Arriving
from outpace.runner.rows import Row
from outpace.sampling import Masks
from outpace.structure import FIELD, Grammar, Matcher
from outpace.types import Request

Bits = np.ndarray[Any, np.dtype[np.int32]]
WORD = 32  # tokens of an int32
MAX_SECONDS = 0.002  # what a token may take of a processor, on average
PATIENCE = 0.25  # seconds that all answers of a grammar get until the average counts


@dataclass(slots=True)
class _Account:
    """What one grammar has cost, in all its answers."""

    seconds: float = 0.0
    fills: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether it holds the others up."""
        return self.seconds > max(PATIENCE, MAX_SECONDS * self.fills)


class _Follower:
    """The matcher of one row."""

    def __init__(self, request: Request, token_ids: Sequence[int], account: _Account) -> None:
        self._request, self._account = request, account
        self._matcher: Matcher | None = None
        self._allowed: Bits | None = None
        self.problem: str | None = None
        """Why the request cannot go on."""
        self._try(self._begin, token_ids)

    def accept(self, token_id: int) -> None:
        """Take in what was chosen."""
        self._try(self._accept, token_id)

    def fill(self, masks: Bits, row: int) -> None:
        """Write what may come next. A request that cannot go on may say anything: nobody reads it."""
        account = self._account
        if self.problem is None and not account.is_slow:
            begin = time.thread_time()
            self._try(self._fill, masks, row)
            account.seconds += time.thread_time() - begin
            account.fills += 1
        if self.problem is None and account.is_slow:
            self.problem = f"{FIELD}: it takes too long to choose tokens by it; make it simpler"
        if self.problem is not None:
            masks[row] = -1

    def _try(self, action: Any, *arguments: Any) -> None:
        """What goes wrong with one grammar is the problem of its request alone."""
        if self.problem is None:
            try:
                self.problem = action(*arguments)
            except Exception as error:
                logger.exception("the matcher of request %r failed", self._request.request_id)
                self.problem = f"the matcher of the answer failed ({type(error).__name__})"

    def _begin(self, token_ids: Sequence[int]) -> str | None:
        assert self._request.grammar is not None, "it has one"
        self._matcher = self._request.grammar.matcher(self._request.end_token_ids)
        for token in token_ids:
            if problem := self._accept(token):
                return problem
        return None

    def _accept(self, token_id: int) -> str | None:
        assert self._matcher is not None, "it has begun"
        if self._matcher.accept(token_id):
            return None
        return f"{FIELD}: the answer left its grammar at token {token_id}"

    def _fill(self, masks: Bits, row: int) -> str | None:
        assert self._matcher is not None, "it has begun"
        self._matcher.fill(masks, row)
        if (only := self._request.params.allowed_token_ids) is not None:
            if self._allowed is None:
                self._allowed = _bits(only, masks.shape[1])
            masks[row] &= self._allowed
        return None if masks[row].any() else f"{FIELD}: no token of the model goes on with the answer"


class Grammars:
    """The followers of all rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._followers: dict[str, _Follower] = {}
        self._accounts: WeakKeyDictionary[Grammar, _Account] = WeakKeyDictionary()
        self._unread: tuple[dict[str, int], Arriving] | None = None
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def clear(self) -> None:
        """Forget every row."""
        self._followers.clear()
        self._unread = None

    def forget(self, requests: Sequence[str]) -> None:
        """These rows are gone; one that comes back begins again."""
        for name in requests:
            if self._followers.pop(name, None) is not None and self._unread is not None:
                self._unread[0].pop(name, None)

    def begin(self, request: Request, token_ids: Sequence[int]) -> None:
        """A row is made, of a request with these tokens, prompt and answer."""
        answer = token_ids[len(request.prompt_token_ids) :]
        assert request.grammar is not None, "it has one"
        account = self._accounts.setdefault(request.grammar, _Account())
        self._followers[request.request_id] = _Follower(request, answer, account)

    def chosen(self, requests: Sequence[Request], places: Sequence[int], arriving: Arriving) -> None:
        """A step has chosen tokens for these, which stand at these places of what arrives."""
        if self._followers:
            self._read()
            names = (request.request_id for request in requests)
            found = {name: place for name, place in zip(names, places, strict=True) if name in self._followers}
            self._unread = (found, arriving) if found else None

    def masks(self, rows: Sequence[Row], vocab_size: int) -> tuple[Masks | None, dict[str, str]]:
        """What the rows that choose tokens now may choose, and which requests cannot go on, and why."""
        self._read()
        held = [(index, row.request.request_id) for index, row in enumerate(rows) if row.request.grammar is not None]
        if not held:
            return None, {}
        host = self._buffer(len(held), -(-vocab_size // WORD))
        bits: Bits = host.numpy()
        failed = {}
        for place, (_, name) in enumerate(held):
            follower = self._followers[name]
            follower.fill(bits, place)
            if follower.problem is not None:
                failed[name] = follower.problem
        return Masks(*self._send([index for index, _ in held], host)), failed

    def _read(self) -> None:
        """Let the followers take in what the step before has chosen."""
        if self._unread is not None:
            (places, arriving), self._unread = self._unread, None
            tokens = arriving.read()[0].tolist()
            for name, place in places.items():
                self._followers[name].accept(tokens[place])

    def _buffer(self, count: int, words: int) -> Tensor:
        """[count, words] of page-locked memory that no copy reads any more; there are two, by turns."""
        self._turn = 1 - self._turn
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        if not self._buffers or self._buffers[self._turn].numel() < count * words:
            size, pinned = 2 * count * words, self._device.type == "cuda"
            if sent := self._sent[1 - self._turn]:
                sent.synchronize()
            self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        return self._buffers[self._turn][: count * words].view(count, words)

    def _send(self, rows: list[int], host: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.tensor(rows)
        if self._device.type != "cuda":
            return index, host
        bits = host.to(self._device, non_blocking=True)
        event = self._sent[self._turn] = torch.cuda.Event()
        event.record()
        return index.pin_memory().to(self._device, non_blocking=True), bits


def _bits(tokens: Sequence[int], words: int) -> Bits:
    """These tokens as a mask."""
    bits = np.zeros(words * WORD, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
