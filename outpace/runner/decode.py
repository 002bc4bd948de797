"""Hugging Face's generation loop over pages: one prefill of the prompts, then a captured graph for each token."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from outpace.inject.paged import BatchModel
from outpace.runner.paged_steps import PagedSteps

Measure = Callable[[], AbstractContextManager[Any]]
"""What times each forward, where somebody wants to know."""

ROOM = 1024  # tokens of a sequence that pages are made for at least, so that a longer call seldom makes new ones
CHECK_EVERY = 16  # steps between looks at whether every sequence has ended: a look makes the host wait for the GPU


class PagedDecoder:
    """Generates from padded prompts. Pages and graphs are kept between calls; each call starts with empty sequences."""

    def __init__(self, model: BatchModel, max_tokens: int, measure: Measure = nullcontext, *, graphs: bool) -> None:
        self._model = model
        self._measure = measure
        self._lock = threading.Lock()
        self._max_tokens = max_tokens
        self._graphs = graphs
        self._state: PagedSteps | None = None

    def __call__(
        self,
        hf_model: Any,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """What `generate(custom_generate=...)` calls: the ids [B, L] with the new tokens after them."""
        mask: Tensor | None = model_kwargs.get("attention_mask")
        limit = generation_config.max_length
        run = _Run(input_ids, limit, logits_processor, stopping_criteria, generation_config, streamer)
        return self._decode(run, input_ids, mask, limit)

    def greedy(self, ids: Tensor, mask: Tensor | None, limit: int, ends: list[int], pad: int | None) -> Tensor:
        """Likeliest tokens up to `limit` in all: what the call above does, without Hugging Face's preparation."""
        config = SimpleNamespace(
            do_sample=False,
            _eos_token_tensor=torch.tensor(ends, device=ids.device) if ends else None,
            _pad_token_tensor=None if pad is None else torch.tensor(pad, device=ids.device),
        )
        run = _Run(ids, limit, LogitsProcessorList(), StoppingCriteriaList(), config, None)
        return self._decode(run, ids, mask, limit)

    def _decode(self, run: "_Run", ids: Tensor, mask: Tensor | None, limit: int) -> Tensor:
        with self._lock:  # pages and buffers belong to one call at a time
            state = self._prepared(ids.shape[0], limit)
            with self._measure():
                logits = state.prefill(ids, mask)
            return run.loop(state, logits, self._measure)

    def _prepared(self, batch: int, length: int) -> PagedSteps:
        if self._state is None or not self._state.fits(batch, length):
            self._state = None  # its pages go before the new ones come
            room = max(length, min(ROOM, self._max_tokens))
            self._state = PagedSteps(self._model, batch, room, graphs=self._graphs)
        return self._state


class _Run:
    """One call of generate: picks tokens from logits as Hugging Face's own loop does."""

    def __init__(
        self,
        prompt: Tensor,
        limit: int,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: Any,
        streamer: Any,
    ) -> None:
        batch, length = prompt.shape
        self._ids = prompt.new_full((batch, limit), 0)
        self._ids[:, :length] = prompt
        self._at = length
        self._processors = processors
        self._criteria = criteria
        self._sample = bool(config.do_sample)
        self._pad = config._pad_token_tensor
        self._has_end = config._eos_token_tensor is not None
        self._open = torch.ones(batch, dtype=torch.int64, device=prompt.device)
        self._late = torch.zeros_like(self._open)  # [B] padding after each end: looks are not taken at every step
        self._streamer = streamer
        self._plain = all(isinstance(item, MaxLengthCriteria | EosTokenCriteria) for item in criteria)
        self._ends = config._eos_token_tensor

    def loop(self, state: PagedSteps, logits: Tensor, measure: Measure) -> Tensor:
        """Tokens until every sequence has ended."""
        while True:
            token = self._pick(logits)
            self._take(token)
            if self._finished():
                break
            state.ids.copy_(token)
            with measure():
                logits = state.step()
        if self._streamer is not None:
            self._streamer.end()
        return self._ids[:, : self._at - int(self._late.min())]

    def _pick(self, logits: Tensor) -> Tensor:
        scores: Any = logits
        if len(self._processors) or self._sample:
            processors: Any = self._processors
            scores = processors(self._ids[:, : self._at], logits.to(torch.float32, copy=True))
        if self._sample:
            token = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            token = scores.argmax(dim=-1)
        return token * self._open + self._pad * (1 - self._open) if self._has_end else token

    def _take(self, token: Tensor) -> None:
        self._late += 1 - self._open
        self._ids[:, self._at] = token
        self._at += 1
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        if not self._plain:
            criteria: Any = self._criteria
            self._open = self._open & ~criteria(self._ids[:, : self._at], None)
        elif self._has_end:
            self._open = self._open & ~torch.isin(token, self._ends)

    def _finished(self) -> bool:
        if self._at >= self._ids.shape[1]:
            return True
        look = not self._plain or self._streamer is not None or (self._has_end and self._at % CHECK_EVERY == 0)
        return bool(look) and int(self._open.max()) == 0
