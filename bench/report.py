"""Prints rows of figures with their limits, and writes them to bench/results/<what>_<device>_<date>.{json,md}."""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import outpace
from outpace.errors import ConfigError
from outpace.kernels import limits

RESULTS = Path(__file__).parent / "results"
WIDTH = 150  # of tables in a file
CONSOLE = Console(width=WIDTH, highlight=False, markup=False)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32

Row = dict[str, Any]
Found = tuple[list[Row], Any]
"""Rows, and details for the JSON file."""


def row(what: str, figure: float, unit: str, limit: float | None = None, other: tuple[str, float] | None = None) -> Row:
    """A figure, its limit, and the best figure of others; a higher ratio is better."""
    more = unit.endswith(("/s", "times"))
    ratio = None if limit is None else figure / limit if more else limit / figure
    return {
        "what": what, "figure": figure, "unit": unit, "limit": "-" if limit is None else limit,
        "of limit": "-" if ratio is None else ratio,
        "best other": "-" if other is None else f"{other[1]:g} ({other[0]})",
        "times other": "-" if other is None else figure / other[1] if more else other[1] / figure,
    }  # fmt: skip


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--out", type=Path, default=RESULTS, help="folder that results are written to")
    return result


def names(there: Sequence[str] | Mapping[str, Any]) -> Callable[[str], list[str]]:
    """The type of an option: known names, separated by commas."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in there]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(there)}")
        return text.split(",")

    return parse


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that is a JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return found


def child(*arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run a Python process, and parse the JSON in its last line of output; `environment` is added to ours."""
    command, variables = [sys.executable, *arguments], os.environ | (environment or {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


@dataclass
class Report:
    """The results so far, and the folder they are written to."""

    what: str
    folder: Path
    speed: limits.Speed = field(default_factory=lambda: limits.measure_speed(DEVICE, DTYPE))
    device: str = field(default_factory=lambda: limits.device_name(DEVICE))
    notes: dict[str, Any] = field(default_factory=dict)
    save: bool = True
    """Whether results are written, after each part."""
    rows: list[Row] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Parts that could not be measured."""
    begin: float = field(default_factory=time.perf_counter)

    def part(self, what: str, measure: Callable[[], Found]) -> None:
        """Measure something; a failure is printed and becomes a row, and the other parts go on."""
        self.say(what)
        try:
            self.add(what, *measure())
        except Exception as error:
            self.failed(what, error)

    def say(self, what: str) -> None:
        """Print a line of progress."""
        CONSOLE.print(f"[{time.perf_counter() - self.begin:6.1f} s] {what}", soft_wrap=True)

    def failed(self, what: str, error: Exception) -> None:
        """Print and write that something could not be measured."""
        CONSOLE.print_exception()
        self.failures.append(what)
        self.add(what, [row(f"{what} FAILED: {type(error).__name__}", 0.0, "")], {"error": str(error)})

    def add(self, what: str, rows: list[Row], details: Any = None) -> None:
        """Print and write results."""
        for each in rows:
            CONSOLE.print("  " + ", ".join(f"{key} {text(value)}" for key, value in each.items()))
        self.rows += rows
        self.details |= {} if details is None else {what: details}
        if self.save:
            rates = {"read bandwidth TB/s": self.speed.bandwidth / 1e12, "bf16 TFLOP/s": self.speed.flops / 1e12}
            save(self.what, self.device, self.rows, rates | self.notes, self.folder, self.details)

    def draw(self, name: str, plot: Callable[[Path], None]) -> None:
        """Draw a picture of these results."""
        draw(picture(self.what, self.device, name, self.folder), plot)

    def show(self) -> None:
        """Print all rows as a table."""
        show(self.what, self.rows)


def save(
    what: str,
    device: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Mapping[str, Any],
    folder: Path,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write rows, notes and versions as JSON and Markdown; details only as JSON."""
    date = datetime.date.today().isoformat()
    versions = {"outpace": outpace.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{what}_{device}_{date}"
    content = {"what": what, "device": device, "date": date, **versions, **notes, "rows": list(rows)}
    if details is not None:
        content["details"] = dict(details)
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [f"# {what} on {device}, {date}", "", *(f"- {key}: {text(value)}" for key, value in notes.items()), ""]
    lines += markdown([*rows[0]], (each.values() for each in rows)) if rows else ["nothing was measured"]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def markdown(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(map(text, row))} |" for row in rows)]


def write_into(path: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two lines of a document."""
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.split(end, 1)[1]}")


def picture(what: str, device: str, name: str, folder: Path) -> Path:
    """The path of a picture of results."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{what}_{device}_{datetime.date.today().isoformat()}_{name}.png"


def draw(path: Path, plot: Callable[[Path], None]) -> None:
    """Draw a picture, unless matplotlib is missing: the figures are worth more than their picture."""
    try:
        plot(path)
    except ConfigError as error:
        CONSOLE.print(f"no picture: {error}")


def show(what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title=what, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column)
    for each in rows:
        table.add_row(*map(text, each.values()))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def text(value: Any) -> str:
    """A value as text in a table."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
