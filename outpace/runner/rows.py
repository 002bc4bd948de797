"""The running requests on the device: a row of tokens and of pages for each. The host sends only what changes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.sampling import is_plain
from outpace.types import Request, ScheduledSequence


class Header(NamedTuple):
    """The S sequences of a step, on the device."""

    rows: Tensor
    """[S] int32: row of each sequence."""
    starts: Tensor
    """[S] int32: position of the first token of each sequence."""
    writes: Tensor
    """[S] int32: position of the token to be sampled."""
    cu_q: Tensor
    """[S + 1] int32: where the tokens of each sequence begin in the batch."""


@dataclass(slots=True)
class Row:
    """A request with its row."""

    index: int
    request: Request
    plain: bool
    """See `sampling.is_plain`."""
    num_blocks: int = 0


@dataclass(slots=True)
class Layout:
    """A step on the host; each list has an entry per sequence."""

    owners: list[Row] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def only(self, indices: Iterable[int]) -> "Layout":
        lists = (self.owners, self.starts, self.counts, self.samples)
        return Layout(*([values[index] for index in indices] for values in lists))  # type: ignore[arg-type]

    def pieces(self, index: int, size: int) -> Iterator["Layout"]:
        """Split one sequence of the step into pieces of at most `size` tokens, which do not sample."""
        start, end = self.starts[index], self.starts[index] + self.counts[index]
        for first in range(start, end, size):
            yield Layout([self.owners[index]], [first], [min(size, end - first)], [False])


class Rows:
    """Rows of requests on the device. Changes go there through page-locked memory, one copy per step.

    There are two buffers, so that a step can be prepared while the previous one is being copied.
    """

    def __init__(self, count: int, max_len: int, max_blocks: int, device: torch.device) -> None:
        self._device = device
        self._width = max_len + 1 + max_blocks
        self.state = torch.zeros(count + 1, self._width, dtype=torch.int32, device=device)
        """[R + 1, L + 1 + M]: tokens and pages side by side."""
        self.tokens = self.state[:, : max_len + 1]
        """[R + 1, L + 1]: the tokens of each request, and a spare column. The last row is for padding."""
        self.table = self.state[:, max_len + 1 :]
        """[R + 1, M]: the pages of each request."""
        self._padding_row, self._spare_column, self._first_page = count, max_len, max_len + 1
        self._header = torch.zeros(4 * count + 1, dtype=torch.int32, device=device)
        self._staging = [_pinned(4 * count + 1, torch.int32, device) for _ in range(2)]
        self._updates = [_pinned(1 << 14, torch.int64, device) for _ in range(2)]
        self._turn = 0
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._free = list(range(count - 1, -1, -1))
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, requests: Iterable[str]) -> Tensor:
        return on_device([self._rows[name].index for name in requests], self._device)

    def clear(self) -> None:
        self._rows.clear()
        self._free = list(range(self._padding_row - 1, -1, -1))

    def forget(self, requests: Iterable[str]) -> None:
        """Free the rows of these requests, if they have any."""
        for name in requests:
            row = self._rows.pop(name, None)
            if row is not None:
                self._free.append(row.index)

    def take(self, sequences: Sequence[ScheduledSequence]) -> Layout:
        """Start a step: give new requests rows, and start copying what changed."""
        self._turn = 1 - self._turn
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        layout, places, values = Layout(), [], []
        for entry in sequences:
            if entry.request is not None:
                self._rows[entry.request_id] = Row(self._free.pop(), entry.request, is_plain(entry.request))
            row = self._rows[entry.request_id]
            if entry.token_ids:
                first = row.index * self._width + (0 if entry.request is not None else entry.start)
                places.append(np.arange(first, first + len(entry.token_ids), dtype=np.int64))
                values.append(np.array(entry.token_ids, dtype=np.int64))
            if entry.new_blocks:
                first = row.index * self._width + self._first_page + row.num_blocks
                places.append(np.arange(first, first + len(entry.new_blocks), dtype=np.int64))
                values.append(np.array(entry.new_blocks, dtype=np.int64))
                row.num_blocks += len(entry.new_blocks)
            layout.owners.append(row)
            layout.starts.append(entry.start)
            layout.counts.append(entry.num_new_tokens)
            layout.samples.append(entry.samples)
        if places:
            self._update(np.concatenate(places), np.concatenate(values))
        return layout

    def send(self, layout: Layout, size: int, *, wait: bool = False) -> Header:
        """Send the header of a step, padded with empty sequences to the given size.

        wait: until it has arrived; a step that sends several headers would overwrite those in flight.
        """
        count, host = len(layout.owners), self._staging[self._turn]
        array = host.numpy()[: 4 * size + 1]
        rows, starts, writes = array[:size], array[size : 2 * size], array[2 * size : 3 * size]
        rows[:count] = [owner.index for owner in layout.owners]
        rows[count:] = self._padding_row
        starts[:count], starts[count:] = layout.starts, 0
        lengths = starts[:count] + np.array(layout.counts, dtype=np.int32)
        writes[:count] = np.where(layout.samples, lengths, self._spare_column)
        writes[count:] = self._spare_column
        cu_q = array[3 * size :]
        cu_q[0] = 0
        np.cumsum(layout.counts, out=cu_q[1 : count + 1])
        cu_q[count + 1 :] = cu_q[count]
        self._header[: 4 * size + 1].copy_(host[: 4 * size + 1], non_blocking=not wait)
        if self._device.type == "cuda" and not wait:
            event = self._sent[self._turn] = torch.cuda.Event()
            event.record()
        return self.header(size)

    def header(self, size: int) -> Header:
        """The header on the device, always at the same address, so that a graph can read it."""
        given = self._header
        rows, starts, writes = (given[i * size : (i + 1) * size] for i in range(3))
        return Header(rows, starts, writes, given[3 * size : 4 * size + 1])

    def write(self, rows: Tensor, places: Tensor, chosen: Tensor) -> None:
        """Write sampled tokens [S] into these rows at these positions."""
        self.state.view(-1).index_copy_(0, rows.long() * self._width + places, chosen.to(torch.int32))

    def _update(self, places: np.ndarray, values: np.ndarray) -> None:
        """Write values at places of the flattened rows."""
        count = len(places)
        if 2 * count > len(self._updates[self._turn]):
            self._updates[self._turn] = _pinned(4 * count, torch.int64, self._device)
        host = self._updates[self._turn]
        array = host.numpy()
        array[:count], array[count : 2 * count] = places, values
        sent = host[: 2 * count].to(self._device, non_blocking=True)
        self.state.view(-1).index_copy_(0, sent[:count], sent[count:].to(torch.int32))


def on_device(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy these numbers to the device without waiting."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
