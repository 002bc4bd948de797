"""`engine.generate` over pages: steps of a runner, and tokens picked from them as Hugging Face's loop does."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from outpace.cache.kv_cache import allocate, blocks_for, page_dtype
from outpace.inject.paged import BatchModel
from outpace.runner.capture import StreamLock
from outpace.runner.products import tune_products
from outpace.runner.rows import on_device
from outpace.runner.runner import Limits, Runner
from outpace.runner.sequences import CHECK_EVERY, Measure, Sequences, until_end
from outpace.runner.staged_sequences import StagedSequences
from outpace.runner.step_graphs import CHUNK_SIZES, FEW, Shape, shapes

ROOM = 1024  # least tokens per sequence to allocate pages for, so that a longer call seldom allocates again
STEP_TOKENS = 8192  # most tokens of a prefill step: longer prompts run in chunks
GRAPH_TOKENS = 2048  # most tokens of a prefill in a graph: longer ones keep the GPU busy, and are not padded


class PagedDecoder:
    """Generates from padded prompts on a runner. Pages and graphs are kept between calls; one call at a time."""

    def __init__(
        self,
        model: BatchModel,
        max_tokens: int,
        measure: Measure = nullcontext,
        *,
        graphs: bool,
        step_tokens: int = STEP_TOKENS,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._model = model
        self._page_dtype = page_dtype(kv_cache_dtype, model.dtype)
        self._measure = measure
        self._lock = StreamLock(model.device)
        self._graphs = graphs and model.capturable
        self._step_tokens = step_tokens
        first = min(ROOM, max_tokens)
        self._room = FEW, first, blocks_for(first)  # sequences, tokens of each, pages of all
        self._runner: Runner | None = None

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
        """Called by `generate(custom_generate=...)`: the ids [B, L] followed by the new tokens."""
        mask: Tensor | None = model_kwargs.get("attention_mask")
        lengths = [item.max_length for item in stopping_criteria if isinstance(item, MaxLengthCriteria)]
        limit = max(input_ids.shape[1] + 1, min([generation_config.max_length, *lengths]))  # at least one new token
        ends = [item.eos_token_id.reshape(-1) for item in stopping_criteria if isinstance(item, EosTokenCriteria)]
        stops = torch.cat([input_ids.new_zeros(0), *(each.to(input_ids) for each in ends)])
        pad = generation_config._pad_token_tensor
        pad = stops[0] if pad is None and ends else pad
        picks = _Picks(logits_processor, stopping_criteria, stops, pad, sample=bool(generation_config.do_sample))
        with self._lock.held():
            sequences = self._begin(input_ids, mask, limit)
            if streamer is None and picks.likeliest:
                return sequences.likeliest(limit, stops, pad)
            return picks.loop(sequences, limit, streamer)

    def greedy(self, ids: Tensor, mask: Tensor | None, limit: int, ends: list[int], pad: int | None) -> Tensor:
        """Greedy decoding up to `limit` tokens in all, without Hugging Face's preparation."""
        stops = on_device(ends, ids.device, ids.dtype)
        with self._lock.held():
            return self._begin(ids, mask, limit).likeliest(limit, stops, pad)

    def _begin(self, ids: Tensor, mask: Tensor | None, limit: int) -> "Sequences":
        """The sequences of a call, on a runner with enough room and no state of the previous call."""
        blocks = blocks_for(limit)
        need = len(ids), limit, len(ids) * blocks
        if self._runner is None or any(want > have for want, have in zip(need, self._room, strict=True)):
            self._graphs = self._graphs and not (self._runner is not None and self._runner.graphs.uncapturable)
            self._runner = None  # free its pages before new ones are allocated
            seqs, length, pages = (max(have, _next_size(want)) for want, have in zip(need, self._room, strict=True))
            self._runner = self._make_runner(seqs, length, pages)
            self._room = seqs, length, pages
        self._runner.reset()
        kind = Sequences if self._model.stage.count == 1 else StagedSequences
        return kind(
            self._model, self._runner, ids, _without_padding(ids, mask), blocks, self._measure, self._step_tokens
        )

    @torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
    def _make_runner(self, num_seqs: int, length: int, num_blocks: int) -> Runner:
        model, most = self._model, self._step_tokens
        pages = allocate(model.kv_heads, num_blocks, self._page_dtype, model.device)
        limits = Limits(max_num_seqs=num_seqs, max_num_batched_tokens=most, max_model_len=length)
        alone = [Shape(size, 1, "fresh") for size in CHUNK_SIZES if size <= GRAPH_TOKENS]
        later = [*shapes(num_seqs, GRAPH_TOKENS), *alone] if self._graphs else ()
        runner = Runner(model, pages, limits, graphs_later=later)
        tune_products(model, runner, later)
        return runner


class _Picks:
    """Picks tokens from logits as Hugging Face's own loop does, with its processors and criteria."""

    def __init__(self, processors: Any, criteria: Any, stops: Tensor, pad: Any, *, sample: bool) -> None:
        self._processors, self._criteria = processors, criteria
        self._stops, self._pad = stops, pad
        self._sample = sample
        self._plain = all(isinstance(item, MaxLengthCriteria | EosTokenCriteria) for item in criteria)
        self.likeliest = self._plain and not sample and not processors
        """Whether it is plain greedy decoding up to a length or an end-of-sequence token."""

    def loop(self, sequences: Sequences, limit: int, streamer: Any) -> Tensor:
        """The ids followed by new tokens, until every sequence has ended."""
        ids, length = sequences.ids, sequences.ids.shape[1]
        going = torch.ones(len(ids), dtype=torch.int64, device=ids.device)
        logits = sequences.whole(sequences.prefill())
        while True:
            picked = self._pick(ids, logits)
            token = picked * going + self._pad * (1 - going) if len(self._stops) else picked
            ids = torch.cat([ids, token[:, None].to(ids.dtype)], 1)
            if streamer is not None:
                streamer.put(token.cpu())
            if not self._plain:
                going = going & ~self._criteria(ids, None)
            elif len(self._stops):
                going = going & ~torch.isin(ids[:, -1], self._stops)
            at = ids.shape[1]
            look = not self._plain or streamer is not None or (len(self._stops) and at % CHECK_EVERY == 0)
            if at >= limit or (look and not bool(going.any())):
                break
            sequences.put(picked)  # for ended sequences too: the pad token may be outside the model's vocabulary
            logits = sequences.whole(sequences.step())
        if streamer is not None:
            streamer.end()
        if not self._plain:
            return ids
        return torch.cat([sequences.ids, until_end(ids[:, length:], self._stops, self._pad)], 1)

    def _pick(self, ids: Tensor, logits: Tensor) -> Tensor:
        """A token for each sequence [B]."""
        scores: Tensor = logits
        if len(self._processors) or self._sample:
            scores = self._processors(ids, logits.to(torch.float32, copy=True))
        if self._sample:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        return scores.argmax(dim=-1)


def _next_size(count: int) -> int:
    """The next of the sizes 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ..."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def _without_padding(ids: Tensor, mask: Tensor | None) -> list[tuple[int, ...]]:
    """The tokens of each row without padding, wherever it is. A row of padding alone is kept."""
    rows = ids.cpu()
    kept = rows if mask is None else [row[keep] for row, keep in zip(rows, mask.bool().cpu(), strict=True)]
    return [tuple((found if len(found) else row).tolist()) for found, row in zip(kept, rows, strict=True)]
