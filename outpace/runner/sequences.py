"""The sequences of one call of `engine.generate` over pages, on a runner."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.inject.paged import BatchModel
from outpace.runner.rows import on_device
from outpace.runner.runner import Runner
from outpace.types import Request, ScheduledSequence, Step

Measure = Callable[[], AbstractContextManager[Any]]
"""A hook that times each forward."""

CHECK_EVERY = 16  # steps between checks for the end of all sequences; a check makes the host wait for the GPU


class Sequences:
    """The sequences of one call: prefill, then one token each per step. Tokens stay on the device."""

    def __init__(
        self,
        model: BatchModel,
        runner: Runner,
        ids: Tensor,
        prompts: list[tuple[int, ...]],
        num_blocks: int,
        measure: Measure,
        step_tokens: int,
    ) -> None:
        """ids: [B, L], with padding; num_blocks: pages of each sequence."""
        self.ids = ids
        self._runner = runner
        self._prompts = prompts
        self._num_blocks = num_blocks
        self._measure = measure
        self._step_tokens = step_tokens
        self.whole = model.vocabulary.whole
        """Gathers this rank's logits to those of the whole vocabulary."""
        self._lens = on_device([len(prompt) for prompt in prompts], ids.device)
        self._num_new = 0

    def prefill(self) -> Tensor:
        """Logits [B, V] after the prompts, of this rank's part of the vocabulary (see `whole`)."""
        found = []
        with self._measure():
            for entries in self._chunks(range(len(self._prompts))):
                logits = self._runner.run(Step(0, sequences=entries), fresh=True).logits
                found.append(logits[: sum(entry.samples for entry in entries)].clone())
        self._num_new = 1
        return torch.cat(found)

    def step(self) -> Tensor:
        """Logits after the newest tokens; the next step overwrites them."""
        with self._measure():
            entries = self._decodes(range(len(self._prompts)), self._num_new)
            logits = self._runner.run(Step(0, sequences=entries)).logits
        self._num_new += 1
        return logits

    def put(self, tokens: Tensor) -> None:
        """Continue with these tokens [B] instead of the greedy ones."""
        self._runner.rows.tokens[self._rows, self._lens + (self._num_new - 1)] = tokens.to(torch.int32)

    def likeliest(self, limit: int, stops: Tensor, pad: Any) -> Tensor:
        """The ids followed by greedy tokens. The host waits for the device only every few steps."""
        self.prefill()
        while self.ids.shape[1] + self._num_new < limit:
            look = len(stops) and self._num_new % CHECK_EVERY == 0
            if look and bool(torch.isin(self._new(), stops).any(1).all()):
                break
            self.step()
        return torch.cat([self.ids, until_end(self._new(), stops, pad)], 1)

    @cached_property
    def _rows(self) -> Tensor:
        """[B] rows of the sequences, once they have begun."""
        return self._runner.rows.of(str(index) for index in range(len(self._prompts)))

    def _new(self) -> Tensor:
        """The new tokens so far [B, N]."""
        places = self._lens[:, None] + torch.arange(self._num_new, device=self._lens.device)
        return self._runner.rows.tokens[self._rows[:, None], places].to(self.ids.dtype)

    def _decodes(self, indices: Iterable[int], num_new: int) -> list[ScheduledSequence]:
        """A step with the newest token of each of these sequences."""
        lengths = {index: len(self._prompts[index]) + num_new for index in indices}
        return [ScheduledSequence(str(index), length - 1, 1, True) for index, length in lengths.items()]

    def _chunks(self, indices: Iterable[int]) -> Iterator[list[ScheduledSequence]]:
        """Split prompts into steps. A prompt that does not fit continues in the next step, so prompts end in order."""
        entries: list[ScheduledSequence] = []
        room = self._step_tokens
        for index in indices:
            prompt, start = self._prompts[index], 0
            while start < len(prompt):
                count = min(room, len(prompt) - start)
                entries.append(self._entry(index, start, count))
                start, room = start + count, room - count
                if not room:
                    yield entries
                    entries, room = [], self._step_tokens
        if entries:
            yield entries

    def _entry(self, index: int, start: int, count: int) -> ScheduledSequence:
        """A chunk of a prompt. The first one carries all its tokens, and the pages for the whole call."""
        name, prompt, samples = str(index), self._prompts[index], start + count == len(self._prompts[index])
        if start:
            return ScheduledSequence(name, start, count, samples)
        blocks = tuple(range(index * self._num_blocks, (index + 1) * self._num_blocks))
        request = Request(request_id=name, prompt_token_ids=prompt)
        return ScheduledSequence(name, 0, count, samples, new_blocks=blocks, request=request, token_ids=prompt)


def until_end(new: Tensor, stops: Tensor, pad: Any) -> Tensor:
    """New tokens [B, N] up to the longest sequence, padded after the first end token of each."""
    if not len(stops):
        return new
    ends = torch.isin(new, stops).long()
    after = (ends.cumsum(1) - ends) > 0
    return new.masked_fill(after, pad)[:, : int((~after).sum(1).max())]
