"""One batch of sequences over pages: its prefill and its steps, from captured graphs where they pay."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.cache.kv_cache import BLOCK_SIZE, Pages, allocate, blocks_for
from outpace.inject.paged import Batch, BatchModel
from outpace.log import logger
from outpace.runner.capture import Uncapturable, captured
from outpace.runner.graphs import mend

PREFILL_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens that a prefill is padded to, so that a graph serves it; a longer one keeps the GPU busy without."""


@dataclass(frozen=True, eq=False)
class _Prompts:
    """Where the tokens of prompts stand, one prompt after another, and where each sequence goes on."""

    positions: Tensor  # [T]
    slots: Tensor  # [T]
    lens: Tensor  # [B]
    cu_q: Tensor  # [B + 1]
    rows: Tensor  # [B] the last token of each
    then: tuple[Tensor, Tensor, Tensor]  # positions, lengths and slots of the first step after them
    length: int  # of the longest


@dataclass(eq=False)
class _PrefillGraph:
    """A captured prefill, its buffers, and whose layout is in them."""

    batch: Batch
    rows: Tensor
    run: Callable[[], Tensor]
    holds: _Prompts | None = None


class PagedSteps:
    """Static buffers of a batch of sequences, their pages, and the graphs that work on them."""

    def __init__(self, model: BatchModel, batch: int, length: int, *, graphs: bool) -> None:
        device, per_sequence = model.device, blocks_for(length)
        self._model = model
        self._length = length
        self._graphs = graphs and model.capturable
        self._pages: Pages = allocate(model.kv_heads, batch * per_sequence, model.dtype, device)
        self._table = torch.arange(batch * per_sequence, dtype=torch.int32, device=device).view(batch, per_sequence)
        self._positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self._lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch, device=device)
        self._cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._step: Callable[[], Tensor] | None = None
        self._prefills: dict[int, _PrefillGraph] = {}
        self._last_whole: _Prompts | None = None
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        """[B] the tokens that the next step starts from."""

    def fits(self, batch: int, length: int) -> bool:
        """Whether these buffers serve a batch; fewer sequences than there are rows would be wasted work."""
        return self._rows.shape[0] == batch and length <= self._length

    def prefill(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [B, V] after the prompts. ids, mask: [B, L]; padding may stand anywhere before a sequence's end."""
        prompts = self._whole(ids.shape[1]) if mask is None else self._packed(mask)
        tokens = ids.reshape(-1) if mask is None else ids[mask.bool()]
        for buffer, value in zip((self._positions, self._lens, self._slots), prompts.then, strict=True):
            buffer.copy_(value)
        size = next((size for size in PREFILL_SIZES if size >= len(tokens)), None)
        if size is None or not self._graphs:
            return self._model.forward(self._batch(tokens, prompts), self._pages, prompts.rows)
        return self._padded_prefill(tokens, prompts, size)

    def _whole(self, length: int) -> "_Prompts":
        """Prompts of one length, which often come again: everything but their tokens is kept."""
        if self._last_whole is None or self._last_whole.length != length:
            count, device = len(self._rows), self._rows.device
            positions = torch.arange(length, device=device).repeat(count)
            cu_q = torch.arange(count + 1, dtype=torch.int32, device=device) * length
            self._last_whole = self._laid_out(self._rows.repeat_interleave(length), positions, cu_q, length)
        return self._last_whole

    def _packed(self, mask: Tensor) -> "_Prompts":
        """Prompts of any lengths, without their padding."""
        keep = mask.bool()
        row, column = torch.nonzero(keep, as_tuple=True)
        positions = (keep.cumsum(1) - 1)[row, column]
        cu_q = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return self._laid_out(row, positions, cu_q, mask.shape[1])

    def _laid_out(self, row: Tensor, positions: Tensor, cu_q: Tensor, length: int) -> "_Prompts":
        lens = cu_q.diff()
        then = (lens.long(), lens + 1, self._slots_of(self._rows, lens.long()))
        return _Prompts(positions, self._slots_of(row, positions), lens, cu_q, cu_q[1:].long() - 1, then, length)

    def _batch(self, tokens: Tensor, prompts: "_Prompts") -> Batch:
        longest = prompts.length
        return Batch(
            tokens, prompts.positions, prompts.slots, self._table, prompts.lens, prompts.cu_q,
            max_q=longest, max_len=longest, fresh=len(self._rows) == 1,
        )  # fmt: skip

    def step(self) -> Tensor:
        """Logits [B, V] after the tokens in `ids`; the next call is one position further and overwrites them."""
        if not self._graphs:
            return self._advance()
        if self._step is None:
            state = (self._positions, self._lens, self._slots)
            self._step = self._captured(self._advance, state)
        return self._step()

    def _padded_prefill(self, tokens: Tensor, prompts: "_Prompts", size: int) -> Tensor:
        if size not in self._prefills:
            self._prefills[size] = self._capture_prefill(size)
        graph, count = self._prefills[size], len(tokens)
        if graph.holds is not prompts:
            static = graph.batch
            static.slots[count:] = -1  # padding is written nowhere
            static.positions[count:] = 0
            static.positions[:count] = prompts.positions
            static.slots[:count] = prompts.slots
            static.seq_lens.copy_(prompts.lens)
            static.cu_q.copy_(prompts.cu_q)
            graph.rows.copy_(prompts.rows)
            graph.holds = prompts
        graph.batch.ids[:count] = tokens
        return graph.run()

    def _capture_prefill(self, size: int) -> "_PrefillGraph":
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=self._rows.device) for _ in range(2))
        slots = torch.full_like(ids, -1)
        lens, cu_q = torch.ones_like(self._lens), torch.zeros_like(self._cu_q)
        fresh = len(lens) == 1
        static = Batch(ids, positions, slots, self._table, lens, cu_q, max_q=size, max_len=size, fresh=fresh)
        rows = torch.zeros_like(self._rows)
        run = self._captured(lambda: self._model.forward(static, self._pages, rows), ())
        return _PrefillGraph(static, rows, run)

    def _captured(self, run: Callable[[], Tensor], state: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """`run` as a graph, or as it is where it cannot be one: experts that look at values, say."""
        try:
            return captured(run, state)
        except Uncapturable as error:
            mend(self._rows.device)
            self._graphs = False
            logger.warning("enable_cuda_graph: a step cannot be captured, running without graphs (%s)", error)
            return run

    def _advance(self) -> Tensor:
        batch = Batch(
            self.ids, self._positions, self._slots, self._table, self._lens, self._cu_q, max_q=1, max_len=self._length
        )
        logits = self._model.forward(batch, self._pages)
        self._positions.add_(1)
        self._lens.add_(1)
        last = self._table.shape[1] * BLOCK_SIZE - 1
        self._slots.copy_(self._slots_of(self._rows, self._positions.clamp(max=last)))
        return logits

    def _slots_of(self, row: Tensor, positions: Tensor) -> Tensor:
        page = self._table[row, positions // BLOCK_SIZE].long()
        return page * BLOCK_SIZE + positions % BLOCK_SIZE
