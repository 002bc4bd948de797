"""bench/results/history.jsonl: a line of JSON for each run of the guard, and the comparison of runs.

Figures are compared by their ratio to the limit that was measured in the same run, so that a slower device does not
look like slower code.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.report import Row
from outpace.bench.plot import canvas
from outpace.errors import InputError

NAME = "history.jsonl"
PANELS = 4  # in each row of the picture
BAND = 0.05  # share by which a ratio may fall
BANDS: Mapping[str, float] = {"start": 0.25}
"""Parts with another band: a start is mostly compilation on the host, and hosts differ by this much."""
Kind = Literal["held", "fell", "rose", "new", "missing"]


@dataclass(frozen=True)
class Figure:
    """A measured figure beside its limit."""

    part: str
    """The model and the part of the guard that it comes from."""
    figure: float
    unit: str
    limit: float
    ratio: float
    """1: at the limit; below: worse."""


@dataclass(frozen=True)
class Run:
    """One line of the file."""

    date: str
    commit: str
    device: str
    versions: Mapping[str, str]
    speed: Mapping[str, float]
    """Rates of the device, from which the limits were computed."""
    figures: Mapping[str, Figure]
    fell: Sequence[str] = field(default=())
    """Figures that fell and were not accepted, so they are no reference for later runs."""


class Past(NamedTuple):
    """A figure that a later one is compared with, and where it comes from."""

    figure: Figure
    run: Run


@dataclass(frozen=True)
class Verdict:
    """A figure compared with its reference."""

    name: str
    kind: Kind
    now: Figure | None = None
    before: Past | None = None

    @property
    def change(self) -> float | None:
        """Share by which the ratio rose; below 0: fell."""
        return self.now.ratio / self.before.figure.ratio - 1 if self.now and self.before else None


def read(path: Path) -> list[Run]:
    """The runs in a file, oldest first; none if there is no file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"history: cannot read {path} ({error})") from None
    return [_run(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _run(where: str, line: str) -> Run:
    try:
        content = json.loads(line)
        figures = {name: Figure(**each) for name, each in content.pop("figures").items()}
        run = Run(**content, figures=figures)
        well = all(each.ratio > 0 and each.limit > 0 for each in figures.values()) and run.device and run.date
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"history: {where} is no run of the guard ({error}); mend or remove that line") from None
    if not well:
        raise InputError(f"history: {where} has a ratio or limit that is not above 0, or no date or device; remove it")
    return run


def write(path: Path, runs: Iterable[Run]) -> None:
    """Write all runs, one per line; the file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs), encoding="utf-8")
    new.replace(path)


def figures_of(part: str, rows: Sequence[Row]) -> dict[str, Figure]:
    """The rows of a part that have a limit, by name."""
    return {
        row["what"]: Figure(part, *(_short(row[key]) for key in ("figure", "unit", "limit", "of limit")))
        for row in rows
        if isinstance(row["limit"], float) and row["figure"] > 0
    }


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def references(runs: Sequence[Run], device: str, named: str | None = None) -> dict[str, Past]:
    """The reference of each figure: the newest on this device that had not fallen, or the figure of a named run.

    named: the beginning of a commit or date; if several runs match, the newest.
    """
    own = [run for run in runs if run.device == device]
    if named is not None:
        own = [run for run in own if run.commit.startswith(named) or run.date.startswith(named)][-1:]
        if not own:
            there = ", ".join(f"{run.commit} ({run.date})" for run in runs if run.device == device) or "none"
            raise InputError(f"reference: no run {named} on {device}; known: {there}")
    found: dict[str, Past] = {}
    for run in own:
        found |= {name: Past(each, run) for name, each in run.figures.items() if name not in run.fell or named}
    return found


def band_of(part: str, band: float | None = None) -> float:
    """Share by which the ratio of a figure of this part may fall."""
    return band if band is not None else BANDS.get(part.rsplit(": ", 1)[-1], BAND)


def compare(now: Mapping[str, Figure], past: Mapping[str, Past], band: float | None = None) -> list[Verdict]:
    """Compare each figure of a run with its reference."""
    found = []
    for name, figure in now.items():
        before = past.get(name)
        kind: Kind = "new"
        if before is not None:
            change, most = figure.ratio / before.figure.ratio - 1, band_of(figure.part, band)
            kind = "fell" if change < -most else "rose" if change > most else "held"
        found.append(Verdict(name, kind, figure, before))
    return found


def missing(run: Run, past: Mapping[str, Past], runs: Sequence[Run], parts: Sequence[str]) -> list[Verdict]:
    """Figures that the last run on the device had and this run lacks, although it ran their parts."""
    (last,) = [each.figures for each in runs if each.device == run.device][-1:] or [{}]
    gone = [name for name in last if name not in run.figures and name in past and past[name].figure.part in parts]
    return [Verdict(name, "missing", None, past[name]) for name in sorted(gone)]


def better(first: Sequence[Row], again: Sequence[Row]) -> list[Row]:
    """The better of two measurements of each row, by ratio; the second one for rows without a limit."""
    before = {row["what"]: row for row in first}

    def choose(row: Row) -> Row:
        other = before.get(row["what"], row)
        ratios = other["of limit"], row["of limit"]
        return other if all(isinstance(ratio, float) for ratio in ratios) and ratios[0] > ratios[1] else row

    return [choose(row) for row in again]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Ratios over the runs of one device: a panel for each part, a line for each figure, red where it fell."""
    parts = list(dict.fromkeys(figure.part for run in runs for figure in run.figures.values()))
    if not parts:
        return
    rows = -(-len(parts) // PANELS)
    figure = canvas(4 * PANELS, 0.8 + 2.9 * rows)
    for place, part in enumerate(parts, 1):
        _panel(figure.add_subplot(rows, PANELS, place), part, runs)
    figure.suptitle(f"{runs[-1].device}: share of the limit measured in the same run", x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def _panel(axis: Any, part: str, runs: Sequence[Run]) -> None:
    for name in dict.fromkeys(name for run in runs for name, each in run.figures.items() if each.part == part):
        ratios = {place: run.figures[name].ratio for place, run in enumerate(runs) if name in run.figures}
        axis.plot([*ratios], [*ratios.values()], "o-", markersize=3, label=name.split(": ", 1)[-1])
        fell = [place for place, run in enumerate(runs) if name in run.fell]
        axis.plot(fell, [ratios[place] for place in fell], "o", color="red", markersize=5)
    axis.set_title(part, loc="left", fontsize=9)
    axis.set(ylim=(0, None), xlim=(-0.5, max(len(runs) - 0.5, 1)))
    axis.set_xticks(range(len(runs)), [run.commit for run in runs], rotation=90, fontsize=6)
    axis.legend(fontsize=6, loc="lower left")
