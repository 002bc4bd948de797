"""One CUDA graph of work on static buffers."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Uncapturable(Exception):
    """A capture failed: why, in one line. `mend` makes the device usable again."""


def captured(run: Callable[[], Result], *, pool: Any, warm_ups: int) -> Callable[[], Result]:
    """`run` as a graph; it must work on static buffers alone. A replay overwrites the result of the one before.

    An error in a warm-up is run's own. Warm-ups run on the stream of the capture, so that what torch makes for each
    stream (cuBLAS: 32 MiB) is made once.
    """
    graph = torch.cuda.CUDAGraph()
    here, side = torch.cuda.current_stream(), torch.cuda.graph(graph).capture_stream
    assert side is not None, "torch makes one"
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
    here.wait_stream(side)
    try:
        with _nothing_collected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
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
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


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
