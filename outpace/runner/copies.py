"""The copies of steps: between pages and host memory on streams of their own, between host memory and files in threads.

Each direction between the device and host memory is a lane of two alternating streams, each with a staging buffer:
while one gathers or scatters the pieces of its blocks, the other's blocks are on the link. Few batches are launched
ahead, so that a long queue of copies does not delay the launch of a step. On a CPU copies are done at once.
"""

import queue
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from outpace.cache.file_blocks import FileBlocks
from outpace.cache.host_pages import HostPages, Pairs
from outpace.types import Copy, Step, Way

AHEAD = 6  # batches of a lane in flight
READERS = 4  # threads that read; one more writes
PATIENCE = 0.05  # seconds to wait for files; nothing is admitted or aborted meanwhile


@dataclass(slots=True)
class _Copying:
    """A copy on its way."""

    copy: Copy
    begin: "torch.cuda.Event | None" = None  # on the main stream: work before it must finish first
    num_left: int = 0  # batches or blocks not known to be done
    events: "list[torch.cuda.Event]" = field(default_factory=list)  # one per launched batch
    failed: list[int] = field(default_factory=list)


class _Lane:
    """One direction between the device and host memory, on a GPU."""

    def __init__(self, host: HostPages, *, out: bool) -> None:
        self._host = host
        self._run = host.store if out else host.fetch
        self._slots: list[tuple[torch.cuda.Stream, Tensor]] = [
            (torch.cuda.Stream(host.device), host.staging()) for _ in range(2)
        ]
        self._turns = count()
        self._waiting: deque[tuple[_Copying, Pairs]] = deque()
        self._launched: deque[tuple[_Copying, torch.cuda.Event]] = deque()

    def add(self, copying: _Copying) -> None:
        pairs, size = copying.copy.pairs, self._host.per_copy
        for begin in range(0, len(pairs), size):
            self._waiting.append((copying, pairs[begin : begin + size]))
            copying.num_left += 1

    def go_on(self) -> None:
        """Record finished batches and launch the next ones."""
        while self._launched and self._launched[0][1].query():
            self._launched.popleft()[0].num_left -= 1
        while self._waiting and len(self._launched) < AHEAD:
            self._launch()

    def launch_whole(self, copying: _Copying) -> None:
        """Launch the rest of a copy, and everything queued before it."""
        while any(waiting is copying for waiting, _ in self._waiting):
            self._launch()

    def wait(self) -> bool:
        """Wait until one more batch is done, if any is in flight."""
        if self._launched:
            self._launched[0][1].synchronize()
        return bool(self._launched)

    def clear(self) -> None:
        """Drop what has not been launched, and wait for the rest."""
        self._waiting.clear()
        self._launched.clear()
        for stream, _ in self._slots:
            stream.synchronize()

    def _launch(self) -> None:
        copying, pairs = self._waiting.popleft()
        stream, staging = self._slots[next(self._turns) % len(self._slots)]
        assert copying.begin is not None, "begun"
        stream.wait_event(copying.begin)
        with torch.cuda.stream(stream):
            self._run(pairs, staging)
            event = torch.cuda.Event()
            event.record(stream)
        copying.events.append(event)
        self._launched.append((copying, event))


class Copies:
    """Runs the copies of steps and reports which are done. Not thread-safe."""

    def __init__(self, host: HostPages, files: FileBlocks | None = None) -> None:
        self.host = host
        self.files = files
        self._copying: dict[int, _Copying] = {}
        self._reported: set[int] = set()
        self._lanes: dict[Way, _Lane] = {}
        self._staging: Tensor | None = None
        if host.device.type == "cuda":
            self._lanes = {Way.STORE: _Lane(host, out=True), Way.LOAD: _Lane(host, out=False)}
            weakref.finalize(self, _finish, host.device).atexit = False
        else:
            self._staging = host.staging()
        self._readers = ThreadPoolExecutor(READERS, "outpace-kv-read") if files else None
        self._writer = ThreadPoolExecutor(1, "outpace-kv-write") if files else None
        self._done: queue.SimpleQueue[tuple[_Copying, int | None]] = queue.SimpleQueue()  # with the place of a failure

    def begin(self, step: Step) -> None:
        """Start the copies of a step. Work launched on the current stream after this call may use the step's blocks."""
        self._wait_for(step.copied)
        for copy_id in step.copied:
            self._copying.pop(copy_id, None)
            self._reported.discard(copy_id)
        self._begin([copy for copy in step.copies if copy.way is not Way.LOAD])
        self._wait_for(step.after)
        self._begin([copy for copy in step.copies if copy.way is Way.LOAD])
        for lane in self._lanes.values():
            lane.go_on()

    def done(self, *, wait: bool = False) -> Mapping[int, tuple[int, ...]]:
        """Finished copies not reported yet, each with its failures. wait: block until there is at least one."""
        found = self._look()
        if wait and not found and self._copying.keys() - self._reported:
            if not any(lane.wait() for lane in reversed(self._lanes.values())):
                self._take(timeout=PATIENCE)
            found = self._look()
        return found

    def reset(self) -> None:
        """Wait until nothing is read or written, then forget all copies."""
        for lane in self._lanes.values():
            lane.clear()
        while any(copying.num_left for copying in self._copying.values() if copying.copy.way not in self._lanes):
            self._take(timeout=PATIENCE)
        self._copying.clear()
        self._reported.clear()

    def warm_up(self) -> None:
        """Compile the kernels by copying a block out and back."""
        self.begin(Step(0, copies=[Copy(-1, Way.STORE, ((0, 0),))], after=[-1]))
        self.begin(Step(0, copies=[Copy(-2, Way.LOAD, ((0, 0),))], after=[-2]))
        self.reset()

    def _begin(self, copies: Iterable[Copy]) -> None:
        event: torch.cuda.Event | None = None
        for copy in copies:
            self._copying[copy.copy_id] = copying = _Copying(copy)
            if copy.way in (Way.READ, Way.WRITE):
                self._submit(copying)
            elif self._lanes:
                if event is None:
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(self.host.device))
                copying.begin = event
                self._lanes[copy.way].add(copying)
            else:
                self._copy_now(copy)

    def _copy_now(self, copy: Copy) -> None:
        assert self._staging is not None, "on a CPU"
        run = self.host.store if copy.way is Way.STORE else self.host.fetch
        for begin in range(0, len(copy.pairs), self.host.per_copy):
            run(copy.pairs[begin : begin + self.host.per_copy], self._staging)

    def _wait_for(self, copies: Iterable[int]) -> None:
        """Make the current stream wait for these."""
        for copying in (self._copying[each] for each in copies if each in self._copying):
            if (lane := self._lanes.get(copying.copy.way)) is not None:
                lane.launch_whole(copying)
                stream = torch.cuda.current_stream(self.host.device)
                for event in copying.events:
                    stream.wait_event(event)

    def _look(self) -> dict[int, tuple[int, ...]]:
        for lane in self._lanes.values():
            lane.go_on()
        self._take()
        found = {
            copy_id: tuple(sorted(copying.failed))
            for copy_id, copying in self._copying.items()
            if copying.num_left == 0 and copy_id not in self._reported
        }
        self._reported.update(found)
        return found

    def _take(self, timeout: float = 0.0) -> None:
        """Record what the threads have finished."""
        try:
            while True:
                copying, failed = self._done.get(timeout=timeout) if timeout else self._done.get_nowait()
                copying.num_left -= 1
                if failed is not None:
                    copying.failed.append(failed)
                timeout = 0.0
        except queue.Empty:
            pass

    def _submit(self, copying: _Copying) -> None:
        assert self._readers is not None
        assert self._writer is not None
        threads = self._readers if copying.copy.way is Way.READ else self._writer
        copying.num_left = len(copying.copy.pairs)
        for place in range(len(copying.copy.pairs)):
            threads.submit(self._transfer, copying, place)

    def _transfer(self, copying: _Copying, place: int) -> None:
        done = False
        try:
            source, target = copying.copy.pairs[place]
            assert self.files is not None
            if copying.copy.way is Way.READ:
                done = self.files.read(source, self._memory(target))
            else:
                done = self.files.write(target, self._memory(source))
        finally:
            self._done.put((copying, None if done else place))

    def _memory(self, block: int) -> memoryview:
        return self.host.memory[block].numpy().data


def _finish(device: torch.device) -> None:
    """Wait for copies before their memory is freed."""
    with suppress(RuntimeError):  # a failed device copies nothing any more
        torch.cuda.synchronize(device)
