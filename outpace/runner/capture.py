"""One CUDA graph of work on static buffers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from outpace.process_wide import COLLECTOR

Result = TypeVar("Result")

CAPTURING = threading.RLock()
"""Held during a capture: only one thread of a process may capture at a time."""


class Uncapturable(Exception):
    """A capture failed, with the reason in one line. Call `mend` to make the device usable again."""


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream to capture on; None on a CPU. torch's own one belongs to the device of the process's first capture."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make this the current CUDA device of the thread, which Triton and captures use; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(
    run: Callable[[], Result], *, pool: Any, side: torch.cuda.Stream | None, warm_ups: int
) -> Callable[[], Result]:
    """Capture `run` as a graph. It may use static buffers only; the caller keeps them alive as long as the graph.

    Each replay overwrites the result of the previous one. Errors in a warm-up are raised as they are. Warm-ups and
    capture run on `side` (see `side_stream`), whose counters and scratch memory the graph uses from then on: graphs
    that may be replayed at the same time need one each.
    """
    assert side is not None, "graphs need a GPU"
    graph = torch.cuda.CUDAGraph()
    with CAPTURING, torch.cuda.device(side.device):
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                run()
        here.wait_stream(side)
        capture = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
        try:  # the garbage collector could free an old graph, which CUDA forbids during a capture
            # the stream is set because a failed capture leaves its own stream current
            with torch.cuda.stream(here), COLLECTOR.off(), _own_workspace(), capture:
                output = run()
        except Exception as error:
            raise Uncapturable((str(error).strip().splitlines() or [type(error).__name__])[0]) from error

    def replay() -> Result:
        graph.replay()
        return output

    return replay


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Make cuBLAS allocate its workspace anew, so that a graph's workspace is in the memory pool of the graph.

    torch keeps one workspace for each stream, which all graphs captured on the stream share, and torch 2.12 and later
    free it when one of them is destroyed (pytorch issue 193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def mend(device: torch.device) -> None:
    """After a failed capture torch's random generator stays in capture mode until a capture succeeds."""
    torch.cuda.synchronize(device)
    graph, side = torch.cuda.CUDAGraph(), side_stream(device)
    with CAPTURING, on_device(device), torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


class StreamLock:
    """A lock for static buffers. Each holder's GPU work runs after the previous holder's, on any stream.

    Its device is the current one while the lock is held.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._device = device
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. The current stream waits for the previous holder's work."""
        with self._lock, on_device(self._device):
            if self._done is None:
                yield
                return
            stream = torch.cuda.current_stream(self._device)
            self._done.wait(stream)
            try:
                yield
            finally:
                self._done.record(stream)
