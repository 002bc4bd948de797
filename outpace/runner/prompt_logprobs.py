"""Log-probabilities of prompt tokens, which need the logits of every position."""

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.runner.results import ArrivingLogprobs
from outpace.runner.rows import Layout, Row
from outpace.sampling import logprobs_of
from outpace.types import TokenLogprobs

PIECE = 256
"""Tokens whose logits are in memory at a time."""


class PromptLogprobs:
    """The prompt log-probabilities of one step."""

    def __init__(self, *, raise_later: bool = False) -> None:
        """raise_later: raise errors when the results are read, since other ranks wait for this one until then."""
        self._pieces: list[tuple[Row, range, ArrivingLogprobs]] = []
        self._raise_later = raise_later
        self._problem: Exception | None = None

    @staticmethod
    def wanted(layout: Layout) -> list[int]:
        """Sequences of a step that compute a part of a prompt and want its log-probabilities."""
        return [
            index
            for index, owner in enumerate(layout.owners)
            if (owner.request.params.prompt_logprobs is not None or owner.request.watch is not None)
            and layout.starts[index] < len(owner.request.prompt_token_ids) - 1
        ]

    def add(self, piece: Layout, logits: Tensor) -> None:
        """Add the logits [T, V] of a piece of one sequence; row t gives the probability of token t + 1."""
        try:
            self._add(piece, logits)
        except Exception as error:
            if not self._raise_later:
                raise
            self._problem = self._problem or error

    def _add(self, piece: Layout, logits: Tensor) -> None:
        owner, first = piece.owners[0], piece.starts[0] + 1
        prompt, wanted = owner.request.prompt_token_ids, owner.request.params.prompt_logprobs
        positions = range(first, min(first + piece.counts[0], len(prompt)))
        if positions and owner.request.watch is not None:
            owner.request.watch(first, logits[: len(positions)])
        if positions and wanted is not None:
            token_ids = torch.tensor(prompt[positions.start : positions.stop], device=logits.device)
            found = logprobs_of(logits[: len(positions)], token_ids, wanted)
            self._pieces.append((owner, positions, ArrivingLogprobs(token_ids, found)))

    def read(self) -> Mapping[str, Mapping[int, TokenLogprobs]]:
        """Wait for them; log-probabilities by request id and position."""
        if self._problem is not None:
            raise self._problem
        found: dict[str, dict[int, TokenLogprobs]] = {}
        for owner, positions, arriving in self._pieces:
            rows = arriving.read([owner.request.params.prompt_logprobs or 0] * len(positions))
            found.setdefault(owner.request.request_id, {}).update(zip(positions, rows, strict=True))
        return found
