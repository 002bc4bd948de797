"""Write results where they can be found: bench/results/<what>_<device>_<date>.{json,md}."""

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import outpace

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--out", type=Path, default=RESULTS, help="folder that results are written to")
    return result


def write(what: str, device: str, rows: Sequence[Mapping[str, Any]], notes: Mapping[str, Any], folder: Path) -> None:
    """Print the rows as a table, and write them with the versions as JSON and Markdown."""
    date = datetime.date.today().isoformat()
    versions = {"outpace": outpace.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{what}_{device}_{date}"
    content = {"what": what, "device": device, "date": date, **versions, **notes, "rows": list(rows)}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    stem.with_suffix(".md").write_text(_markdown(what, device, date, {**versions, **notes}, rows))
    _show(what, rows)


def _markdown(what: str, device: str, date: str, notes: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [f"# {what} on {device}, {date}", ""]
    lines += [f"- {key}: {_text(value)}" for key, value in notes.items()]
    lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_text(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _show(what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=what, title_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(_text, row.values()))
    Console().print(table)


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
