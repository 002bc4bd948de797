"""The tokens that grammars allow in a step: a matcher for each row that has a grammar, and the masks on the device.

A matcher is one step late: it reads the tokens that a step has chosen only after the next forward has been launched, so
that the device works meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from outpace.log import logger
from outpace.structured.compile import WORD, CompiledGrammar, Masks, Matcher
from outpace.structured.outputs import FIELD
from outpace.types import Request

MAX_SECONDS = 0.002  # CPU time for the mask of one token, on average
PATIENCE = 0.25  # seconds of CPU time of all answers of a grammar, from which on the average counts


@dataclass(slots=True)
class _Cost:
    """CPU time of one grammar, in all its answers."""

    seconds: float = 0.0
    fills: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether it delays the other requests."""
        return self.seconds > max(PATIENCE, MAX_SECONDS * self.fills)


class _Follower:
    """The matcher of one row."""

    def __init__(self, request: Request, token_ids: Sequence[int], cost: _Cost) -> None:
        assert request.grammar is not None, "only rows with a grammar have a follower"
        self._request, self._cost = request, cost
        self._grammar: CompiledGrammar = request.grammar
        self._matcher: Matcher | None = None
        self._allowed: Masks | None = None
        self.problem: str | None = None
        """Why the request cannot continue."""
        self._try(self._begin, token_ids)

    def accept(self, token_id: int) -> None:
        """Take in a chosen token."""
        self._try(self._accept, token_id)

    def fill(self, masks: Masks, row: int) -> None:
        """Write which tokens may come next. After a problem all may: the answer is thrown away."""
        cost = self._cost
        if self.problem is None and not cost.is_slow:
            begin = time.thread_time()
            self._try(self._fill, masks, row)
            cost.seconds += time.thread_time() - begin
            cost.fills += 1
        if self.problem is None and cost.is_slow:
            self.problem = f"{FIELD}: choosing tokens takes too long; make it simpler"
        if self.problem is not None:
            masks[row] = -1

    def _try(self, action: Callable[..., str | None], *arguments: Any) -> None:
        """An error in one grammar fails its request alone, not the step."""
        if self.problem is None:
            try:
                self.problem = action(*arguments)
            except Exception as error:
                logger.exception("the matcher of request %r failed", self._request.request_id)
                self.problem = f"the matcher of the answer failed ({type(error).__name__})"

    def _begin(self, token_ids: Sequence[int]) -> str | None:
        self._matcher = self._grammar.matcher(self._request.end_token_ids)
        return next((problem for token in token_ids if (problem := self._accept(token))), None)

    def _accept(self, token_id: int) -> str | None:
        assert self._matcher is not None, "`_begin` made it"
        return None if self._matcher.accept(token_id) else f"{FIELD}: the answer left its grammar at token {token_id}"

    def _fill(self, masks: Masks, row: int) -> str | None:
        assert self._matcher is not None, "`_begin` made it"
        self._matcher.fill(masks, row)
        if (only := self._request.params.allowed_token_ids) is not None:
            if self._allowed is None:
                self._allowed = _bits(only, masks.shape[1])
            masks[row] &= self._allowed
        return None if masks[row].any() else f"{FIELD}: no token of the model can continue the answer"


class RowMasks:
    """The matchers of all rows with a grammar, and their masks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._followers: dict[str, _Follower] = {}
        self._costs: WeakKeyDictionary[CompiledGrammar, _Cost] = WeakKeyDictionary()
        self._unread: tuple[dict[str, int], Callable[[], list[Tensor]]] | None = None
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def clear(self) -> None:
        """Forget every row."""
        self._followers.clear()
        self._unread = None

    def forget(self, requests: Sequence[str]) -> None:
        """Forget these rows. A request that comes back calls `begin` again."""
        for name in requests:
            if self._followers.pop(name, None) is not None and self._unread is not None:
                self._unread[0].pop(name, None)

    def begin(self, request: Request, token_ids: Sequence[int]) -> None:
        """Follow a new row. token_ids: prompt and answer so far."""
        assert request.grammar is not None, "the caller checks"
        cost = self._costs.setdefault(request.grammar, _Cost())
        answer = token_ids[len(request.prompt_token_ids) :]
        self._followers[request.request_id] = _Follower(request, answer, cost)

    def chosen(self, requests: Sequence[Request], places: Sequence[int], read: Callable[[], list[Tensor]]) -> None:
        """A step has chosen tokens for these requests, at these places of the first tensor that `read` waits for."""
        if self._followers:
            self._read()
            names = (request.request_id for request in requests)
            found = {name: place for name, place in zip(names, places, strict=True) if name in self._followers}
            self._unread = (found, read) if found else None

    def allowed(
        self, requests: Sequence[Request], vocab_size: int
    ) -> tuple[tuple[Tensor, Tensor] | None, dict[str, str]]:
        """The tokens that this batch may choose: rows [R] and their bits [R, words]; and the requests that cannot
        continue, with the reason."""
        self._read()
        held = [(index, request.request_id) for index, request in enumerate(requests) if request.grammar is not None]
        if not held:
            return None, {}
        host = self._buffer(len(held), -(-vocab_size // WORD))
        bits: Masks = host.numpy()
        failed = {}
        for place, (_, name) in enumerate(held):
            follower = self._followers[name]
            follower.fill(bits, place)
            if follower.problem is not None:
                failed[name] = follower.problem
        return self._send([index for index, _ in held], host), failed

    def _read(self) -> None:
        """Give the matchers the tokens of the previous step."""
        if self._unread is not None:
            (places, read), self._unread = self._unread, None
            tokens = read()[0].tolist()
            for name, place in places.items():
                self._followers[name].accept(tokens[place])

    def _buffer(self, count: int, words: int) -> Tensor:
        """[count, words] of page-locked memory that no copy still reads. Two buffers are used in turns."""
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


def _bits(tokens: Sequence[int], words: int) -> Masks:
    """These tokens as a mask."""
    bits = np.zeros(words * WORD, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
