"""Copies of blocks. The streams of a GPU are stood in for by ones that run what was launched when a test says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.cache.file_blocks import SECTOR, FileBlocks
from outpace.cache.host_pages import HostPages, runs
from outpace.cache.kv_cache import Pages, allocate
from outpace.runner import copies as module
from outpace.runner.copies import AHEAD, Copies
from outpace.types import Copy, Step, Way

CPU = torch.device("cpu")


class Stream:
    """Work that is done in order, once somebody asks for it."""

    all: list["Stream"] = []  # noqa: RUF012

    def __init__(self, device: object = None) -> None:
        self.work: list[Callable[[], object]] = []
        Stream.all.append(self)

    def wait_event(self, event: "Event") -> None:
        self.work.append(event.run)

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


class Event:
    """Is done when its stream has come so far."""

    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.work.append(self._mark)

    def _mark(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done

    def run(self) -> None:
        while not self.done:
            self.stream.work.pop(0)()

    synchronize = run


class Launching(HostPages):
    """Host pages whose copies are work of the current stream."""

    current: Stream

    def store(self, pairs: Any, staging: Tensor) -> None:
        self.current.work.append(lambda: super(Launching, self).store(pairs, staging))

    def fetch(self, pairs: Any, staging: Tensor) -> None:
        self.current.work.append(lambda: super(Launching, self).fetch(pairs, staging))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that steps run on."""
    Stream.all.clear()
    main = Stream()

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        before, Launching.current = Launching.current, stream
        yield
        Launching.current = before

    Launching.current = main
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(module, "_finish", lambda _: None)
    return main


def made(num_host: int, *, num_blocks: int = 16, kind: type[HostPages] = HostPages, per_copy: int = 2) -> Any:
    """Pages of random numbers, and copies to host memory beside them."""
    pages = allocate([(2, 4, 6), (1, 8, 3)], num_blocks, torch.float32, CPU, 4)
    for tensor in pages.tensors():
        tensor.copy_(torch.randn(tensor.shape))
    size = sum(tensor[0].nbytes for tensor in pages.tensors())
    host = kind(torch.zeros(num_host, size, dtype=torch.uint8), CPU)
    host.per_copy = per_copy
    host.bind(pages)
    return pages, host


def as_if_on_a_gpu(host: HostPages) -> Copies:
    host.device = torch.device("cuda")
    host.staging = lambda: torch.empty(host.per_copy, host.row_bytes, dtype=torch.uint8)  # type: ignore[method-assign]
    copies = Copies(host)
    host.device = CPU  # of the indices
    return copies


def block(pages: Pages, index: int) -> list[Tensor]:
    return [tensor[index].clone() for tensor in pages.tensors()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_runs_of_neighbours() -> None:
    assert list(runs([4, 5, 6, 2, 3, 9])) == [(0, 3), (3, 5), (5, 6)]
    assert list(runs([])) == []


def test_on_a_cpu_copies_are_done_at_once_and_told_once() -> None:
    pages, host = made(6)
    copies, wanted = Copies(host), block(pages, 3)
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, ((1, 0), (3, 4), (2, 1)))]))
    assert copies.done() == {0: ()}
    assert copies.done(wait=True) == {}
    copies.begin(Step(1, copied=[0], copies=[Copy(1, Way.LOAD, ((4, 9),))]))
    assert same(block(pages, 9), wanted)
    assert copies.done() == {1: ()}


def test_lanes_launch_few_batches_ahead_and_tell_what_is_done(gpu: Stream) -> None:
    pages, host = made(40, kind=Launching)
    copies = as_if_on_a_gpu(host)
    wanted = [block(pages, index) for index in range(16)]
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, tuple((index, index + 7) for index in range(16)))]))
    lane = copies._lanes[Way.STORE]
    assert (len(lane._launched), len(lane._waiting)) == (AHEAD, 8 - AHEAD)
    assert copies.done() == {}
    rounds = 0
    while not (found := copies.done(wait=True)):
        rounds += 1
    assert found == {0: ()}
    assert 2 <= rounds <= 8
    for tensor in pages.tensors():
        tensor.zero_()
    copies.begin(Step(1, copied=[0], copies=[Copy(1, Way.LOAD, tuple((index + 7, index) for index in range(16)))]))
    while not copies.done(wait=True):
        pass
    assert all(same(block(pages, index), wanted[index]) for index in range(16))


def test_a_step_runs_after_the_copies_that_read_its_blocks(gpu: Stream) -> None:
    pages, host = made(40, kind=Launching)
    copies = as_if_on_a_gpu(host)
    wanted = [block(pages, index) for index in range(16)]
    gpu.work.append(lambda: pages.keys[0][3].fill_(5.0))  # a step before it
    wanted[3][0].fill_(5.0)
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, tuple((index, index) for index in range(16)))], after=[0]))
    assert not copies._lanes[Way.STORE]._waiting, "the step would wait for what was never launched"
    gpu.work.append(lambda: [tensor.zero_() for tensor in pages.tensors()])  # the step
    gpu.synchronize()
    assert not pages.keys[0].any()
    copies.begin(Step(1, copied=[0], copies=[Copy(1, Way.LOAD, tuple((index, index) for index in range(16)))]))
    while not copies.done(wait=True):
        pass
    assert all(same(block(pages, index), wanted[index]) for index in range(16))


def test_a_rank_that_lags_waits_for_what_the_first_one_has_seen_done(gpu: Stream) -> None:
    pages, host = made(8, kind=Launching)
    copies, wanted = as_if_on_a_gpu(host), block(pages, 2)
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, ((2, 5),))]))
    copies.begin(Step(1, copied=[0], copies=[Copy(1, Way.LOAD, ((5, 9),))]))  # nothing was asked for in between
    copies.begin(Step(2, copied=[1]))
    gpu.synchronize()
    assert same(block(pages, 9), wanted)
    assert not copies._copying


def test_what_is_reset_is_forgotten_once_it_is_over(gpu: Stream) -> None:
    _, host = made(8, kind=Launching)
    copies = as_if_on_a_gpu(host)
    copies.warm_up()
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, tuple((index, index) for index in range(8)))]))
    copies.reset()
    assert not any(stream.work for stream in Stream.all if stream is not gpu)
    assert copies.done(wait=True) == {}
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, ((1, 1),))]))
    assert copies.done(wait=True) == {0: ()}


def test_blocks_go_to_files_and_come_back(tmp_path: Path) -> None:
    host = HostPages(_aligned(4), CPU)
    host.memory.copy_(torch.randint(0, 256, host.memory.shape, dtype=torch.uint8))
    wanted = host.memory.clone()
    files = FileBlocks(str(tmp_path), 3, SECTOR)
    copies = Copies(host, files)
    copies.begin(Step(0, copies=[Copy(0, Way.WRITE, ((0, 2), (3, 1)))]))
    assert _wait(copies) == {0: ()}
    host.memory.zero_()
    copies.begin(Step(1, copied=[0], copies=[Copy(1, Way.READ, ((2, 1), (0, 3), (1, 2)))]))
    assert _wait(copies) == {1: (1,)}, "block 0 was never written"
    assert torch.equal(host.memory[1], wanted[0])
    assert torch.equal(host.memory[2], wanted[3])
    copies.begin(Step(2, copies=[Copy(2, Way.READ, ((2, 0),))]))
    copies.reset()
    assert torch.equal(host.memory[0], wanted[0])


def _wait(copies: Copies) -> dict[int, tuple[int, ...]]:
    while not (found := dict(copies.done(wait=True))):
        pass
    return found


def _aligned(num_blocks: int) -> Tensor:
    raw = torch.empty((num_blocks + 1) * SECTOR, dtype=torch.uint8)
    begin = -raw.data_ptr() % SECTOR
    return raw[begin : begin + num_blocks * SECTOR].view(num_blocks, SECTOR)
