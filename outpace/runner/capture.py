"""One CUDA graph of work on static buffers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from outpace.process_wide import COLLECTOR

Result = TypeVar("Result")

CAPTURING = threading.RLock()
"""Held during a capture: only one thread of a process may capture at a time."""


class Uncapturable(Exception):
    """A capture failed, with the reason in one line. Call `mend` to make the device usable again."""


def captured(run: Callable[[], Result], *, pool: Any, warm_ups: int) -> Callable[[], Result]:
    """Capture `run` as a graph. It may use static buffers only; the caller keeps them alive as long as the graph.

    Each replay overwrites the result of the previous one. Errors in a warm-up are raised as they are.
    """
    graph = torch.cuda.CUDAGraph()
    with CAPTURING:
        here, side = torch.cuda.current_stream(), torch.cuda.graph(graph).capture_stream
        assert side is not None, "torch makes one"
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                run()
        here.wait_stream(side)
        capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
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

    torch keeps one workspace for each stream, and all graphs are captured on one stream. Graphs of two engines would
    share it, and torch 2.12 and later free it when any graph is destroyed (pytorch issue 193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def mend(device: torch.device) -> None:
    """After a failed capture torch's random generator stays in capture mode until a capture succeeds."""
    torch.cuda.synchronize(device)
    with CAPTURING, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


class StreamLock:
    """A lock for static buffers. Each holder's GPU work runs after the previous holder's, on any stream."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._device = device
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. The current stream waits for the previous holder's work."""
        with self._lock:
            if self._done is None:
                yield
                return
            stream = torch.cuda.current_stream(self._device)
            self._done.wait(stream)
            try:
                yield
            finally:
                self._done.record(stream)
