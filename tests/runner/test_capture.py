"""What a capture does with streams and threads. torch's part is played here: a CPU has no graphs."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outpace.runner import step_graphs
from outpace.runner.capture import StreamLock, Uncapturable, captured
from outpace.runner.step_graphs import Shape, StepGraphs


class Stream:
    device = torch.device("cuda")

    def wait_stream(self, other: "Stream") -> None:
        """Nothing runs."""


class Event:
    """Notes which streams it is recorded on, and which wait for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Stream]] = []
        self.record, self.wait = (functools.partial(self._note, what) for what in ("record", "wait"))

    def _note(self, what: str, stream: Stream) -> None:
        self.seen.append((what, stream))


class Cuda:
    """The stream that is current, and captures of which the end may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own, self.side = Stream(), Stream()
        self.current = self.own
        self.fails = False
        self.events: list[str] = []
        cuda = self

        class Graph:
            def __init__(self, graph: Any, *, stream: Stream, **_: Any) -> None:
                self._stream = stream

            def __enter__(self) -> None:
                cuda.events.append("begin")
                self._before, cuda.current = cuda.current, self._stream

            def __exit__(self, *_: object) -> None:
                cuda.events.append("end")
                if cuda.fails:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.current = self._before

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, cuda.current = cuda.current, chosen
            try:
                yield
            finally:
                cuda.current = before

        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        clear = functools.partial(cuda.events.append, "clear")
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.current)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_warm_ups_and_the_capture_run_on_one_stream(cuda: Cuda) -> None:
    seen: list[Stream] = []
    captured(lambda: seen.append(cuda.current), pool=None, side=cast(Any, cuda.side), warm_ups=2)
    assert seen == [cuda.side] * 3
    assert cuda.current is cuda.own


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_share_no_workspace(cuda: Cuda, fails: bool) -> None:
    """A graph's is allocated after the capture began, so in the graph's pool, and nothing else gets it later."""
    cuda.fails = fails
    with suppress(Uncapturable):
        side = cast(Any, cuda.side)
        captured(lambda: cuda.events.append("run"), pool=None, side=side, warm_ups=1)
    assert cuda.events == ["run", "clear", "begin", "run", "end", "clear"]


def test_a_capture_that_fails_leaves_the_callers_stream(cuda: Cuda) -> None:
    cuda.fails = True
    with pytest.raises(Uncapturable, match="operation failed"):
        captured(lambda: None, pool=None, side=cast(Any, cuda.side), warm_ups=1)
    assert cuda.current is cuda.own


def test_one_capture_at_a_time(cuda: Cuda) -> None:
    together, met = threading.Barrier(2), []

    def run() -> None:
        with suppress(threading.BrokenBarrierError):
            met.append(together.wait(0.2))  # another thread comes here too, if it can

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: captured(run, pool=None, side=cast(Any, cuda.side), warm_ups=1), range(2)))
    assert not met


def test_the_next_holder_waits_on_its_own_stream_for_the_work_of_the_last(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, other = Event(), Stream()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    lock = StreamLock(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError), lock.held():
        assert 1 // 0
    cuda.current = other
    with lock.held():
        assert event.seen[-2:] == [("record", cuda.own), ("wait", other)]
    assert event.seen[-1] == ("record", other)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The runs before each capture, and -1 for each time the device was mended, as they come."""
    seen: list[int] = []

    def noted(run: Callable[[], Any], *, pool: Any, side: Any, warm_ups: int) -> Callable[[], Any]:
        seen.append(warm_ups)
        if run() > warm_ups:
            raise Uncapturable("a kernel is new")
        return lambda: warm_ups

    monkeypatch.setattr(step_graphs, "captured", noted)
    monkeypatch.setattr(step_graphs, "mend", lambda device: seen.append(-1))
    return seen


def capture(graphs: StepGraphs, shape: Shape, needed: int = 0, *, compiled: bool = True) -> bool:
    """A step that can be captured after so many runs."""

    def run(shape: Shape) -> Any:
        return needed

    return graphs.capture(shape, run, compiled=compiled)


def test_only_the_first_step_of_a_kind_runs_before_it_is_captured(tries: list[int]) -> None:
    graphs = StepGraphs(torch.device("cpu"))
    given = [Shape(2048, 8, "mixed"), Shape(1024, 8, "mixed"), Shape(128, 8, "mixed"), Shape(96, 8, "mixed")]
    given += [Shape(256, 256, "decode"), Shape(240, 240, "decode"), Shape(16, 16, "decode")]
    assert all(capture(graphs, shape) for shape in given)
    assert tries == [1, 0, 1, 0, 1, 0, 1]  # 128 and 96 tokens are multiplied by another library, 16 by own kernels
    assert capture(graphs, Shape(4, 4, "decode"), compiled=False)
    assert tries[-1] == 1


def test_a_capture_that_fails_at_once_is_tried_again_after_a_run(tries: list[int]) -> None:
    graphs = StepGraphs(torch.device("cpu"))
    assert capture(graphs, Shape(16, 16, "decode"))
    assert capture(graphs, Shape(8, 8, "decode"), needed=1)
    assert tries == [1, 0, -1, 1]
    assert len(graphs) == 2
    assert not graphs.uncapturable
    assert not capture(graphs, Shape(4, 4, "decode"), needed=2)
    assert tries[4:] == [0, -1, 1, -1]
    assert len(graphs) == 0
    assert graphs.uncapturable
