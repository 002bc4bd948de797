"""The sequences of one call over pipeline stages: in groups, so that all stages work at the same time.

All ranks make the same call and run their layers of every step in the same order; the last stage broadcasts what it
sampled. The order of steps is deterministic: of the groups whose tokens are known, the one that has waited longest; if
there is none, the next chunk of a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.parallel.stages import parts_of
from outpace.runner.sequences import CHECK_EVERY, Sequences, until_end
from outpace.types import ScheduledSequence, Step

LEAST_TOKENS = 256  # of a piece of prompts
PIECES = 4  # of prompts, for each stage


@dataclass(eq=False)
class SequenceGroup:
    """Sequences that are in the same steps."""

    members: range
    chunks: list[list[ScheduledSequence]]
    """Prompt chunks still to compute."""
    num_new: int = 0
    """New tokens of each, including those in flight."""
    since: int = -1
    """Number of its last step."""
    arriving: list[tuple[Callable[[], None], Tensor, list[str]]] = field(default_factory=list)
    """Tokens in flight from the last stage, and their sequences."""


def next_group(groups: Sequence[SequenceGroup], now: int, stages: int) -> SequenceGroup | None:
    """The group to run in step `now`; None: all are finished."""
    decoding = [group for group in groups if not group.chunks]
    first = min(decoding, key=lambda group: group.since, default=None)
    if first is not None and first.since <= now - stages:
        return first  # its tokens have arrived
    return next((group for group in groups if group.chunks), first)


class StagedSequences(Sequences):
    """Like `Sequences`, with the same results on all ranks."""

    def __init__(self, model: Any, *args: Any) -> None:
        super().__init__(model, *args)
        self._stage, self._vocab_size = model.stage, model.vocab_size
        self._joined = self.whole
        self.whole = lambda logits: logits  # `prefill` and `step` return logits of the whole vocabulary
        total = sum(len(prompt) for prompt in self._prompts)
        self._step_tokens = min(self._step_tokens, max(LEAST_TOKENS, -(-total // (PIECES * self._stage.count))))
        self._groups = [
            SequenceGroup(range(*part), list(self._chunks(range(*part))))
            for part in parts_of(len(self._prompts), self._stage.count)
        ]

    def prefill(self) -> Tensor:
        with self._measure():
            found = [self._logits(chunk, fresh=True) for group in self._groups for chunk in group.chunks]
        self._num_new = 1
        return self._joined_logits(found)

    def step(self) -> Tensor:
        with self._measure():
            found = [self._logits(self._decodes(group.members, self._num_new)) for group in self._groups]
        self._num_new += 1
        return self._joined_logits(found)

    def _logits(self, entries: list[ScheduledSequence], *, fresh: bool = False) -> tuple[Callable[[], None], Tensor]:
        """Run a step; broadcast its logits [S, V] to all ranks."""
        ran = self._runner.run(Step(0, sequences=entries), fresh=fresh)
        count = sum(entry.samples for entry in entries)
        if self._stage.is_last:
            logits = self._joined(ran.logits[:count]).float().clone()
        else:
            logits = torch.empty(count, self._vocab_size, device=self.ids.device)
        return (self._stage.peers.start_from_first(logits) if count else lambda: None), logits

    def _joined_logits(self, found: list[tuple[Callable[[], None], Tensor]]) -> Tensor:
        for finish, _ in found:
            finish()
        self._stage.link.flush()
        return torch.cat([logits for _, logits in found])

    def likeliest(self, limit: int, stops: Tensor, pad: Any) -> Tensor:
        """The ids followed by greedy tokens. Groups do not wait for each other."""
        most, now = limit - self.ids.shape[1], 0
        going = list(self._groups)
        while (group := next_group(going, now, self._stage.count)) is not None:
            self._take(group)
            if not group.chunks and (group.num_new >= most or self._has_ended(group, stops)):
                going.remove(group)
                continue
            with self._measure():
                self._run(group)
            group.since, now = now, now + 1
        self._stage.link.flush()
        self._num_new = max(group.num_new for group in self._groups)
        return torch.cat([self.ids, until_end(self._new(), stops, pad)], 1)

    def _run(self, group: SequenceGroup) -> None:
        """Run the next step of a group and start sending its tokens to the other stages."""
        fresh = bool(group.chunks)
        entries = group.chunks.pop(0) if fresh else self._decodes(group.members, group.num_new)
        ran = self._runner.run(Step(0, sequences=entries), fresh=fresh)
        names = [entry.request_id for entry in entries if entry.samples]
        if not group.chunks:
            group.num_new += 1
        if names:
            tokens = torch.empty(len(names), dtype=torch.int64, device=self.ids.device)
            if self._stage.is_last:
                tokens.copy_(ran.likeliest[: len(names)])
            group.arriving.append((self._stage.peers.start_from_first(tokens), tokens, names))

    def _take(self, group: SequenceGroup) -> None:
        """Wait for a group's tokens and write them to its rows."""
        for finish, tokens, names in group.arriving:
            finish()
            index = torch.tensor([int(name) for name in names], device=self.ids.device)
            places = self._lens[index] + max(0, group.num_new - 1)
            self._runner.rows.tokens[self._runner.rows.of(names), places] = tokens.to(torch.int32)
        group.arriving = []

    def _has_ended(self, group: SequenceGroup, stops: Tensor) -> bool:
        """Whether all its sequences have ended; checked every few steps."""
        if not len(stops) or not group.num_new or group.num_new % CHECK_EVERY:
            return False
        names = [str(index) for index in group.members]
        lens = self._lens[group.members.start : group.members.stop]
        places = lens[:, None] + torch.arange(group.num_new, device=lens.device)
        new = self._runner.rows.tokens[self._runner.rows.of(names)[:, None], places]
        return bool(torch.isin(new, stops.to(new.dtype)).any(1).all())
