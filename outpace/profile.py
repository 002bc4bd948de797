"""Measures the time of each forward and generate, and of each submodule if requested."""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.utils.hooks import RemovableHandle

from outpace.errors import NotSupported, StateError

HISTORY = 65_536  # most times kept of one kind
MODULE_ROWS = 20  # submodules in the table, the slowest first

Span = Callable[[], float]  # the milliseconds of one measured piece of work, once it is done


class Profiler:
    """Times forward and generate while it is on; costs nothing while it is off."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = False
        self._on = False
        self._paused = False
        self._handles: list[RemovableHandle] = []
        self._open: dict[int, list[Callable[[], Span]]] = defaultdict(list)
        self._unread: deque[Span] = deque(maxlen=HISTORY)
        self._spans: dict[str, deque[Span]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._modules: dict[str, deque[Span]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def start(self, module: nn.Module, *, use_cuda_events: bool, modules: bool, graphs: bool) -> None:
        """Forget all times and start to profile a module, with CUDA events or the wall clock."""
        if modules and graphs:
            raise NotSupported(
                "profile_model_time(modules=True): a CUDA graph runs as one piece; profile an engine without "
                "enable_cuda_graph to see its modules"
            )
        self.stop()
        self._events = use_cuda_events and self._device.type == "cuda"
        self._on = True
        self._hook(module, self._record_forward)
        for name, part in module.named_modules() if modules else ():
            if name:
                self._hook(part, self._modules[name].append)

    def stop(self) -> None:
        """Stop, and forget all times."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for times in (self._open, self._unread, self._spans, self._modules):
            times.clear()
        self._on = False

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Time a piece of work under a name; nothing inside `forward` is timed again."""
        if not self._on:
            yield
            return
        finish = self._begin()
        yield
        span = finish()
        if what == "forward":
            self._record_forward(span)
        else:
            self._spans[what].append(span)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hooks do not measure inside this block: in a graph capture their events would be captured."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take_times(self) -> list[float]:
        """Milliseconds of each forward since the last call of this."""
        if not self._on:
            raise StateError("model_times: profiling is not on; call profile_model_time() first")
        times = [span() for span in self._unread]
        self._unread.clear()
        return times

    def table(self) -> Table:
        """Count, mean, median and 95th percentile of each kind of work."""
        if not self._on:
            raise StateError("profile_summary: profiling is not on; call profile_model_time() first")
        table = Table(title="Outpace profile (milliseconds)")
        for column in ("what", "count", "mean", "p50", "p95", "total"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for what, spans in self._spans.items():
            table.add_row(what, *_figures([span() for span in spans]))
        modules = {name: times for name, spans in self._modules.items() if (times := [span() for span in spans])}
        for name in sorted(modules, key=lambda name: -sum(modules[name]))[:MODULE_ROWS]:
            table.add_row(f"  {name}", *_figures(modules[name]))
        return table

    def _record_forward(self, span: Span) -> None:
        self._unread.append(span)
        self._spans["forward"].append(span)

    def _hook(self, module: nn.Module, record: Callable[[Span], None]) -> None:
        open_spans = self._open[len(self._handles)]  # a stack: a module may call itself

        def before(_: nn.Module, __: Any) -> None:
            if not self._paused:
                open_spans.append(self._begin())

        def after(*_: Any) -> None:
            if open_spans:
                record(open_spans.pop()())

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _begin(self) -> Callable[[], Span]:
        """Start the clock; the result stops it and gives the span."""
        if not self._events:
            self._wait()
            begin = time.perf_counter()
            return lambda: _fixed(self._elapsed(begin))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(torch.cuda.current_stream(self._device))

        def finish() -> Span:
            last.record(torch.cuda.current_stream(self._device))
            return lambda: _event_time(first, last)

        return finish

    def _elapsed(self, begin: float) -> float:
        self._wait()
        return (time.perf_counter() - begin) * 1e3

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _fixed(milliseconds: float) -> Span:
    return lambda: milliseconds


def _event_time(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    last.synchronize()
    return float(first.elapsed_time(last))


def _figures(times: list[float]) -> tuple[str, ...]:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    values = (statistics.fmean(times), statistics.median(times), p95, sum(times))
    return str(len(times)), *(f"{value:.3f}" for value in values)
