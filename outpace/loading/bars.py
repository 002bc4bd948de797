"""Progress bars on a terminal, for loading weights and measuring plans."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import rich.progress as rich
from rich.console import Console

from outpace.loading.stream import Advance
from outpace.loading.weights import Source, stored_bytes


@contextmanager
def progress(sources: Mapping[str, Source], *, shown: bool = True) -> Iterator[Advance]:
    """Show a bar with GB and GB/s while weights are read, if stderr is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda count: None
        return
    total = stored_bytes(sources)
    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(rich.TextColumn("weights"), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def passes() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar while a plan is measured, on a terminal only: the task, passes done, all passes (0: unknown)."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    text = rich.TextColumn("{task.description}")
    columns = (text, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
