"""Write results where they can be found: bench/results/<what>_<device>_<date>.{json,md}."""

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import outpace

RESULTS = Path(__file__).parent / "results"
WIDTH = 150  # of tables in a file


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--out", type=Path, default=RESULTS, help="folder that results are written to")
    return result


def write(what: str, device: str, rows: Sequence[Mapping[str, Any]], notes: Mapping[str, Any], folder: Path) -> None:
    """Print the rows as a table, and write them with the versions as JSON and Markdown."""
    save(what, device, rows, notes, folder)
    show(what, rows)


def save(
    what: str,
    device: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Mapping[str, Any],
    folder: Path,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write the rows with the versions as JSON and Markdown; details are in the JSON alone."""
    date = datetime.date.today().isoformat()
    versions = {"outpace": outpace.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{what}_{device}_{date}"
    content = {"what": what, "device": device, "date": date, **versions, **notes, "rows": list(rows)}
    if details is not None:
        content["details"] = dict(details)
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    stem.with_suffix(".md").write_text(_markdown(what, device, date, {**versions, **notes}, rows))


def picture(what: str, device: str, name: str, folder: Path) -> Path:
    """Where a picture of these results goes."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{what}_{device}_{datetime.date.today().isoformat()}_{name}.png"


def _markdown(what: str, device: str, date: str, notes: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [f"# {what} on {device}, {date}", ""]
    lines += [f"- {key}: {text(value)}" for key, value in notes.items()]
    lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(text(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def show(what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title=what, title_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(text, row.values()))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def text(value: Any) -> str:
    """A value as it stands in a table."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
