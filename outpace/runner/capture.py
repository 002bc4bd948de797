"""One CUDA graph of work on static buffers."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

CAPTURING = threading.RLock()
"""Held by the thread that captures: torch captures on one stream, so there is one capture at a time in a process."""


class Uncapturable(Exception):
    """A capture failed: why, in one line. `mend` makes the device usable again."""


def captured(run: Callable[[], Result], *, pool: Any, warm_ups: int) -> Callable[[], Result]:
    """`run` as a graph; it must work on static buffers alone, which the caller keeps alive as long as the graph.

    A replay overwrites the result of the one before.
    An error in a warm-up is run's own. Warm-ups run on the stream of the capture, so that what torch makes for each
    stream (cuBLAS: 32 MiB) is made once.
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
        try:
            with torch.cuda.stream(here), _nothing_collected(), capture:  # a capture that fails stays on its stream
                output = run()
        except Exception as error:
            raise Uncapturable((str(error).strip().splitlines() or [type(error).__name__])[0]) from error

    def replay() -> Result:
        graph.replay()
        return output

    return replay


def mend(device: torch.device) -> None:
    """After a failed capture torch's random generator stays in capture mode until a capture succeeds."""
    torch.cuda.synchronize(device)
    with CAPTURING, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


class StreamLock:
    """A lock for static buffers. The work of a holder runs after that of the one before, whatever their streams are."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._device = device
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it. The current stream waits for the work of the holder before."""
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


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python may find an old graph to free at any moment, and CUDA refuses to free one during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
