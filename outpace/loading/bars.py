"""The bar that shows how far loading is."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from outpace.loading.stream import Advance
from outpace.loading.weights import Source, stored_bytes


@contextmanager
def progress(sources: Mapping[str, Source], *, shown: bool = True) -> Iterator[Advance]:
    """A bar with GB and GB/s while weights are read; only on a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda count: None
        return
    total = stored_bytes(sources)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("weights"), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def passes() -> Iterator[Callable[[str, int, int], None]]:
    """A bar of what is being measured, and how many passes are done of how many (0: nobody knows); on a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
