"""Shared by commands that measure: files for results, progress lines, and printing."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from outpace.errors import InputError


@dataclass(frozen=True)
class ResultFiles:
    """Files for results. A path that cannot be written is refused before the measurement, which can take minutes."""

    json: Path | None = None
    plot: Path | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        for path in (self.json, self.plot, self.profile):
            if path is not None and not path.parent.is_dir():
                raise InputError(f"{path}: there is no folder {path.parent}; make it first")
            if path is not None and path.exists() and not path.is_file():
                raise InputError(f"{path}: it exists and is not a file; name another")
        if self.plot is not None:
            from outpace.bench.plot import check_plot

            check_plot(self.plot)

    def write(self, found: dict[str, Any], draw: Callable[[Path], None] = lambda path: None) -> None:
        """Write the figures, and draw the plot."""
        write_json(self.json, found)
        if self.plot is not None:
            draw(self.plot)


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show progress: on a terminal in one changing line, elsewhere in one line for each step."""
    shown = console or Console(stderr=True)
    if shown.is_terminal:
        with shown.status("starting") as status:
            yield status.update
    else:
        yield lambda step: shown.print(step, highlight=False, markup=False)


def show(*parts: RenderableType) -> None:
    """Print tables and lines, without wrapping lines."""
    for part in parts:
        Console().print(part, highlight=False, soft_wrap=isinstance(part, str))


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write figures to a file; None: do not."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")
