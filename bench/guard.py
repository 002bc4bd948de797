"""Measures the most important figures in ten minutes, and compares them with earlier runs on the same device.

Figures are compared by their ratio to the limit that is measured in the same run. If a figure falls, its part is
measured again, and the better figure counts. Exit code 0: no figure fell by more than 5 % (starts: 25 %); 1: one did,
or could not be measured; 2: bad options or a broken history. The run is added to history.jsonl, which is plotted.
"""

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

import outpace
from bench import history, report
from bench.history import Figure, Past, Run, Verdict
from bench.plans import TINY, Sizes
from bench.report import CONSOLE, Found, Report, Row
from bench.runtime import ALONE, DEFAULTS, SHARED, Bench, Measure
from outpace.errors import InputError
from outpace.kernels.limits import Speed, device_name, measure_speed
from outpace.kernels.triton_stub import HAS_TRITON, triton

MEASURES: dict[str, Measure] = {"throughput": SHARED["throughput"], **DEFAULTS}
"""Parts that share one start of a model, with the defaults of `LLM`."""
PARTS = (*MEASURES, *(part for part in ALONE if part != "deterministic"))
Plan = Mapping[str, Sequence[str]]
PLAN: Plan = {
    "llama-3.1-8b": ("throughput", "long-prompts", "batches", "prefill", "splitfuse", "start"),
    "qwen3-0.6b": ("throughput",),
    "qwen2.5-7b": ("batches",),
    "gemma-2-2b": ("batches", "start"),
    "llama-3.2-1b": ("batches",),
    "attention": ("few-long",),
}
"""Parts of each model."""
TINY_PLAN: Plan = {"tiny": tuple(part for part in PARTS if part != "few-long"), "attention": ("few-long",)}
FULL = Sizes(batches=(1, 8), prefills=(8192,))
AGAIN_UNTIL = 400.0  # seconds after which no part is measured again


@dataclass(kw_only=True)
class Guard(Report):
    """A run, the references of its figures, and its line in history.jsonl."""

    runs: Sequence[Run]
    """Earlier runs."""
    run: Run
    past: Mapping[str, Past]
    band: float | None
    accept: bool
    parts: list[str] = field(default_factory=list)
    """Parts that have run."""

    def measure(self, plan: Plan, sizes: Sizes) -> None:
        """Measure every part of a plan, with the default options of `LLM`."""
        for model, parts in plan.items():
            bench = Bench(model, self, sizes)
            bench.share_start({part: MEASURES[part] for part in parts if part in MEASURES}, bench.plain)
            bench.start_alone(parts)

    def part(self, what: str, measure: Callable[[], Found]) -> None:
        """Measure a part, and write the line after each part, since the run may be killed."""
        rows = list[Row]()
        super().part(what, partial(self._twice_if_worse, what, measure, rows))
        self.parts.append(what)
        figures = {**self.run.figures, **history.figures_of(what, rows)}
        verdicts = [] if self.accept else history.compare(figures, self.past, self.band)
        self.run = replace(self.run, figures=figures, fell=[each.name for each in verdicts if each.kind == "fell"])
        if figures:
            history.write(self.folder / history.NAME, [*self.runs, self.run])

    def _twice_if_worse(self, what: str, measure: Callable[[], Found], rows: list[Row]) -> Found:
        """Measure a part, and again if a figure fell. `rows` gets the rows that count, also if the second try fails."""
        rows[:], details = measure()
        now = history.compare(history.figures_of(what, rows), self.past, self.band)
        worse = [each for each in now if each.kind == "fell"]
        if worse and time.perf_counter() - self.begin < AGAIN_UNTIL:
            self.say(f"{what}: again, since {worse[0].name} fell by {-(worse[0].change or 0):.1%}")
            again, details = measure()
            rows[:] = history.better(rows, again)
        return rows, details

    def verdicts(self) -> list[Verdict]:
        """Each figure compared with its reference, and the figures of the last run that are missing."""
        found = history.compare(self.run.figures, self.past, self.band)
        return [*found, *history.missing(self.run, self.past, self.runs, self.parts)]


def show(verdicts: Sequence[Verdict]) -> None:
    """Print all figures with their references."""
    rows = [
        {
            "figure": each.name,
            "now": _text(each.now),
            "of limit": "-" if each.now is None else each.now.ratio,
            "before": _text(each.before and each.before.figure),
            "of its limit": "-" if each.before is None else each.before.figure.ratio,
            "of": "-" if each.before is None else each.before.run.commit,
            "change": "-" if each.change is None else f"{each.change:+.1%}",
            "verdict": each.kind,
        }
        for each in verdicts
    ]
    report.show("guard", rows)


def _text(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.figure:.6g} {figure.unit}"


def problems(verdicts: Sequence[Verdict], failures: Sequence[str], band: float | None) -> list[str]:
    """The reasons for exit code 1, one sentence each."""
    found = [f"{what} could not be measured" for what in failures]
    for each in verdicts:
        if each.kind == "fell" and each.now and each.before:
            now, (before, run) = each.now, each.before
            found.append(
                f"{each.name} fell by {-(each.change or 0):.1%} (allowed: {history.band_of(now.part, band):.0%}): "
                f"{_text(now)}, {now.ratio:.3f} of its limit; it was {_text(before)}, {before.ratio:.3f} ({run.commit})"
            )
        elif each.kind == "missing" and each.before:
            found.append(f"{each.name} was not measured; it was {_text(each.before.figure)} ({each.before.run.commit})")
    return found


def commit() -> str:
    """The commit that is checked out, with + if files differ from it; "unknown" without git."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=report.RESULTS, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        name = git("rev-parse", "--short", "HEAD")
        return name + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") or "unknown"
    except OSError:
        return "unknown"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = report.parser(__doc__)
    options.add_argument("--models", help=f"of {', '.join(PLAN)} (attention: few-long); default: all")
    options.add_argument("--only", help=f"parts, of {', '.join(PARTS)}; default: all")
    options.add_argument("--history", type=Path, default=report.RESULTS / history.NAME, help="runs to compare with")
    options.add_argument("--reference", metavar="RUN", help="compare with this run: a commit or a date of the history")
    options.add_argument("--band", type=float, help="share by which a ratio may fall, e.g. 0.05")
    options.add_argument("--accept", action="store_true", help="figures that fell become references; exit code 0")
    options.add_argument("--commit", help="name of this run; default: the commit that is checked out")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the guard itself on a CPU")
    return options


def chosen_plan(plan: Plan, models: str | None, only: str | None) -> Plan:
    """The requested part of a plan."""
    names = plan if models is None else models.split(",")
    parts = PARTS if only is None else only.split(",")
    for option, asked, there in (("models", names, plan), ("only", parts, PARTS)):
        if unknown := [each for each in asked if each not in there]:
            raise InputError(f"{option}: there is no {', '.join(unknown)}; there are {', '.join(there)}")
    found = {model: [part for part in plan[model] if part in parts] for model in names}
    if not any(found.values()):
        raise InputError(f"only: none of these models has the parts {', '.join(parts)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare and write; returns the exit code."""
    options = parser()
    asked = options.parse_args(arguments)
    device = device_name(report.DEVICE)
    if asked.band is not None and not 0 < asked.band < 1:
        options.error(f"--band: must be between 0 and 1, got {asked.band}")
    try:
        plan = chosen_plan(TINY_PLAN if asked.tiny else PLAN, asked.models, asked.only)
        runs = history.read(asked.history)
        past = history.references(runs, device, asked.reference)
    except InputError as error:
        options.error(f"--{error}")
    if not past:
        CONSOLE.print(f"no run on {device} in {asked.history} yet: this run becomes the reference")
    speed, given = measure_speed(report.DEVICE, report.DTYPE), {"band": asked.band, "accept": asked.accept}
    run = begun(asked.commit or commit(), device, speed)
    guard = Guard("guard", asked.out, speed, device, save=False, runs=runs, run=run, past=past, **given)
    guard.measure(plan, TINY if asked.tiny else FULL)
    own = [each for each in (*runs, guard.run) if each.device == device]
    report.draw(asked.out / f"history_{device}.png", partial(history.plot, own))
    verdicts = guard.verdicts()
    show(verdicts)
    wrong = problems(verdicts, guard.failures, asked.band)
    for each in wrong or ["nothing fell"]:
        CONSOLE.print(("accepted: " if asked.accept else "WORSE: ") * bool(wrong) + each, soft_wrap=True)
    return 1 if wrong and not asked.accept else 0


def begun(name: str, device: str, speed: Speed) -> Run:
    """A new run without figures."""
    compiler = triton.__version__ if HAS_TRITON else "none"
    versions = {"outpace": outpace.__version__, "torch": torch.__version__, "triton": compiler}
    rates = {"read_bandwidth_gb_s": speed.bandwidth / 1e9, "matmul_gflop_s": speed.flops / 1e9}
    return Run(datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), name, device, versions, rates, {})


if __name__ == "__main__":
    sys.exit(main())
