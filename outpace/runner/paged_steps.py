"""One batch of sequences over pages: its prefill and its steps, from captured graphs where they pay."""

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.cache.kv_cache import BLOCK_SIZE, Pages, allocate, blocks_for
from outpace.inject.paged import Batch, BatchModel
from outpace.log import logger
from outpace.runner.graphs import first_line, mend

PREFILL_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens that a prefill is padded to, so that a graph serves it; a longer one keeps the GPU busy without."""
WARM_UPS = 2


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
        self._prefills: dict[int, tuple[Batch, Tensor, Callable[[], Tensor]]] = {}
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        """[B] the tokens that the next step starts from."""

    def fits(self, batch: int, length: int) -> bool:
        """Whether these buffers serve a batch; fewer sequences than there are rows would be wasted work."""
        return self._rows.shape[0] == batch and length <= self._length

    def prefill(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [B, V] after the prompts. ids, mask: [B, L]; padding may stand anywhere before a sequence's end."""
        batch = self._whole(ids) if mask is None else self._packed(ids, mask)
        lens = batch.seq_lens
        self._positions.copy_(lens)
        self._lens.copy_(lens + 1)
        self._slots.copy_(self._slots_of(self._rows, self._positions))
        rows = batch.cu_q[1:].long() - 1
        size = next((size for size in PREFILL_SIZES if size >= len(batch.ids)), None)
        if size is None or not self._graphs:
            return self._model.forward(batch, self._pages, rows)
        return self._padded_prefill(batch, rows, size)

    def _whole(self, ids: Tensor) -> Batch:
        """The tokens of prompts of one length: nothing needs to be looked up, so nothing waits for the GPU."""
        count, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(count)
        starts = torch.arange(count + 1, dtype=torch.int32, device=ids.device) * length
        return Batch(
            ids.reshape(-1), positions, self._slots_of(self._rows.repeat_interleave(length), positions), self._table,
            starts.diff(), starts, max_q=length, max_len=length, fresh=count == 1,
        )  # fmt: skip

    def _packed(self, ids: Tensor, mask: Tensor) -> Batch:
        """The tokens of all prompts one after another, without padding."""
        keep = mask.bool()
        lens = keep.sum(1)
        row, column = torch.nonzero(keep, as_tuple=True)
        positions = (keep.cumsum(1) - 1)[row, column]
        cu_q = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
        return Batch(
            ids[row, column], positions, self._slots_of(row, positions), self._table, lens.to(torch.int32), cu_q,
            max_q=ids.shape[1], max_len=ids.shape[1], fresh=len(lens) == 1,
        )  # fmt: skip

    def step(self) -> Tensor:
        """Logits [B, V] after the tokens in `ids`; the next call is one position further and overwrites them."""
        if not self._graphs:
            return self._advance()
        if self._step is None:
            state = (self._positions, self._lens, self._slots)
            self._step = self._captured(self._advance, state)
        return self._step()

    def _padded_prefill(self, batch: Batch, rows: Tensor, size: int) -> Tensor:
        if size not in self._prefills:
            self._prefills[size] = self._capture_prefill(size)
        static, static_rows, run = self._prefills[size]
        count = batch.ids.shape[0]
        static.slots[count:] = -1  # padding is written nowhere
        static.positions[count:] = 0
        for target, given in (
            (static.ids, batch.ids),
            (static.positions, batch.positions),
            (static.slots, batch.slots),
        ):
            target[:count] = given
        static.seq_lens.copy_(batch.seq_lens)
        static.cu_q.copy_(batch.cu_q)
        static_rows.copy_(rows)
        return run()

    def _capture_prefill(self, size: int) -> tuple[Batch, Tensor, Callable[[], Tensor]]:
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=self._rows.device) for _ in range(2))
        slots = torch.full_like(ids, -1)
        lens, cu_q = torch.ones_like(self._lens), torch.zeros_like(self._cu_q)
        fresh = len(lens) == 1
        static = Batch(ids, positions, slots, self._table, lens, cu_q, max_q=size, max_len=size, fresh=fresh)
        rows = torch.zeros_like(self._rows)
        return static, rows, self._captured(lambda: self._model.forward(static, self._pages, rows), ())

    def _captured(self, run: Callable[[], Tensor], state: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """`run` as a graph, or as it is where it cannot be one: experts that look at values, say."""
        try:
            return _captured(run, state)
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


class Uncapturable(Exception):
    """A capture failed; nothing was run, and buffers are as they were."""


def _captured(run: Callable[[], Tensor], state: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """`run` as a graph. It must work on static buffers alone; those in `state`, which it changes, are put back."""
    graph = torch.cuda.CUDAGraph()
    saved = [buffer.clone() for buffer in state]
    here, side = torch.cuda.current_stream(), torch.cuda.graph(graph).capture_stream
    assert side is not None, "torch makes one"
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
            for buffer, value in zip(state, saved, strict=True):
                buffer.copy_(value)
    here.wait_stream(side)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
    except Exception as error:
        raise Uncapturable(first_line(error)) from error

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
