"""What commands that measure share: where results go, and lines that say what is going on."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.errors import InputError


@dataclass(frozen=True)
class Files:
    """Where results go. What cannot be written is said before minutes have gone into it."""

    json: Path | None = None
    plot: Path | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        for path in (self.json, self.plot, self.profile):
            if path is not None and not path.parent.is_dir():
                raise InputError(f"{path}: there is no folder {path.parent}; make it first")
            if path is not None and path.exists() and not path.is_file():
                raise InputError(f"{path}: it is not a file; give the name of one")
        if self.plot is not None:
            from outpace.verify.plot import check_plot

            check_plot(self.plot)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is going on: in one line that moves on a terminal, in a line each elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda step: console.print(step, highlight=False, markup=False)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write figures into a file, if there is to be one."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")
