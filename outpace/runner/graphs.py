"""CUDA graphs of a whole `forward`: one for each input signature, a bounded number of them."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import masking_utils

from outpace.log import logger
from outpace.runner.capture import CAPTURING, StreamLock, Uncapturable, captured, mend, side_stream
from outpace.tree import map_tensors, signature, tensors

WARM_UPS = 3  # torch requires warm-up on a side stream, so that lazy initialisation is not captured


class ForwardGraphs:
    """Runs a function of tensors from captured graphs. What cannot be captured runs without (the reason is logged)."""

    def __init__(self, run: Callable[..., Any], device: torch.device, *, limit: int, static_output: bool) -> None:
        self._run = run
        self._device = device
        self._limit = limit
        self._static_output = static_output
        self._graphs: OrderedDict[Hashable, tuple[list[torch.Tensor], Callable[[], Any]]] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._side = side_stream(device)
        self._lock = StreamLock(device)
        self.uncapturable: str | None = None
        """Why graphs are no longer used, after a failed capture."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = signature((args, kwargs)) if self.uncapturable is None else None
        if key is None:  # a cache or another stateful object: every such call differs
            return self._run(*args, **kwargs)
        with self._lock.held():
            if key in self._graphs or self._add(key, args, kwargs):
                self._graphs.move_to_end(key)
                inputs, replay = self._graphs[key]
                for static, given in zip(inputs, tensors((args, kwargs)), strict=True):
                    static.copy_(given, non_blocking=True)
                output = replay()
                return output if self._static_output else map_tensors(torch.clone, output)
        return self._run(*args, **kwargs)

    def clear(self) -> None:
        """Drop all graphs and free their memory."""
        self._graphs.clear()

    def _add(self, key: Hashable, args: Any, kwargs: Any) -> bool:
        """Capture a graph for this signature; False: that failed."""
        # not in inference mode: later calls may write to these tensors outside of it
        with torch.inference_mode(False), torch.no_grad():
            static = map_tensors(lambda tensor: tensor.to(self._device, copy=True), (args, kwargs))
        while len(self._graphs) >= self._limit:
            self._graphs.popitem(last=False)
        try:
            with CAPTURING, _no_extra_mask():
                run = partial(self._run, *static[0], **static[1])
                replay = captured(run, pool=self._pool, side=self._side, warm_ups=WARM_UPS)
        except Uncapturable as error:
            mend(self._device)
            self.uncapturable = str(error)
            logger.warning("enable_cuda_graph: this model cannot be captured, running without graphs (%s)", error)
            self.clear()
            return False
        self._graphs[key] = list(tensors(static)), replay
        return True


@contextmanager
def _no_extra_mask() -> Iterator[None]:
    """While a stream is captured, transformers 5.17 makes a mask even if none is given, and then runs other kernels.

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
