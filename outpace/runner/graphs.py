"""CUDA graphs of a whole `forward`: one for each input signature, a bounded number of them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils

from outpace.log import logger
from outpace.tree import map_tensors, signature, tensors

WARM_UPS = 3  # torch asks for warm-up on a side stream: lazy initialisation must not be captured


class ForwardGraphs:
    """Runs a function of tensors from captured graphs; what cannot be captured runs as it is, and the log says why."""

    def __init__(self, run: Callable[..., Any], device: torch.device, *, limit: int, static_output: bool) -> None:
        self._run = run
        self._device = device
        self._limit = limit
        self._static_output = static_output
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._lock = threading.Lock()  # the static buffers belong to one call at a time
        self.uncapturable: str | None = None
        """Why graphs are not used, once a capture has failed."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = signature((args, kwargs)) if self.uncapturable is None else None
        if key is None:  # a cache or another object with state: every such call is a new one
            return self._run(*args, **kwargs)
        with self._lock, torch.cuda.device(self._device):
            captured = self._graphs.get(key)
            if captured is None:
                captured = self._add(key, args, kwargs)
            if captured is not None:
                self._graphs.move_to_end(key)
                output = captured.replay((args, kwargs))
                return output if self._static_output else map_tensors(torch.clone, output)
        return self._run(*args, **kwargs)

    def clear(self) -> None:
        """Forget every graph and give its memory back."""
        self._graphs.clear()

    def _add(self, key: Hashable, args: Any, kwargs: Any) -> "_Captured | None":
        captured = _Captured(self._run, map_tensors(lambda tensor: tensor.to(self._device, copy=True), (args, kwargs)))
        captured.warm_up()  # an error here is the model's own
        while len(self._graphs) >= self._limit:
            self._graphs.popitem(last=False)
        try:
            captured.capture(self._pool)
        except Exception as error:
            mend(self._device)
            self.uncapturable = first_line(error)
            logger.warning(
                "enable_cuda_graph: this model cannot be captured, running without graphs (%s)", self.uncapturable
            )
            self.clear()
            return None
        self._graphs[key] = captured
        return captured


class _Captured:
    """One graph with its static inputs and outputs."""

    def __init__(self, run: Callable[..., Any], static: tuple[Any, Any]) -> None:
        self._run = lambda: run(*static[0], **static[1])
        self._inputs = list(tensors(static))
        self._graph = torch.cuda.CUDAGraph()
        self._output: Any = None

    def warm_up(self) -> None:
        """Run on the stream of the capture, so that what torch makes for each stream (cuBLAS: 32 MiB) is made once."""
        here, side = torch.cuda.current_stream(), torch.cuda.graph(self._graph).capture_stream
        assert side is not None, "torch makes one"
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run()
        here.wait_stream(side)

    def capture(self, pool: Any) -> None:
        """Record the work; nothing is run."""
        with _no_mask_out_of_nothing(), torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = self._run()

    def replay(self, inputs: Any) -> Any:
        """Run the recorded work on other inputs; the output is overwritten by the next replay."""
        for static, given in zip(self._inputs, tensors(inputs), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._output


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _no_mask_out_of_nothing() -> Iterator[None]:
    """While a stream is captured, transformers 5.17 makes a mask even where none is given, and so runs other kernels.

    A mask that is given is still built in full, since a replay may come with other values.
    """
    masks: Any = masking_utils
    before = masks.is_tracing

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and before(tensor)

    masks.is_tracing = is_tracing
    try:
        yield
    finally:
        masks.is_tracing = before


def mend(device: torch.device) -> None:
    """After a failed capture torch's random generator still believes it is captured; a capture that works tells it."""
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
