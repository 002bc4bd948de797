"""One CUDA graph of work on static buffers."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from outpace.runner.graphs import first_line

Result = TypeVar("Result")


class Uncapturable(Exception):
    """A capture failed; nothing was run, and buffers are as they were."""


def captured(
    run: Callable[[], Result], state: tuple[Tensor, ...] = (), *, pool: Any = None, warm_ups: int = 2
) -> Callable[[], Result]:
    """`run` as a graph. It must work on static buffers alone; those in `state`, which it changes, are put back."""
    graph = torch.cuda.CUDAGraph()
    saved = [buffer.clone() for buffer in state]
    here, side = torch.cuda.current_stream(), torch.cuda.graph(graph).capture_stream
    assert side is not None, "torch makes one"
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
            for buffer, value in zip(state, saved, strict=True):
                buffer.copy_(value)
    here.wait_stream(side)
    try:
        with _nothing_collected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = run()
    except Exception as error:
        raise Uncapturable(first_line(error)) from error

    def replay() -> Result:
        graph.replay()
        return output

    return replay


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
