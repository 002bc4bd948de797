"""The error of each layer as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from outpace.errors import ConfigError, InputError
from outpace.verify.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before anything has run for it."""
    _figure()
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"plot: {path.name} must end in one of {', '.join(FORMATS)}")


def plot(report: Report, path: Path) -> None:
    """Draw error by layer, a line for each set of prompts, and what is allowed below it, dashed."""
    figure = _figure()
    axes = figure.subplots()
    for prompts in report.prompts:
        places = range(len(prompts.places))
        (line,) = axes.plot(places, [place.error for place in prompts.places], marker=".", label=prompts.name)
        axes.plot(places, [place.allowed for place in prompts.places], "--", color=line.get_color(), alpha=0.4)
    axes.set_yscale("log")
    axes.set_xlabel("0 is the embedding, then the layers; the logits are last")
    axes.set_ylabel("relative error")
    axes.set_title(f"{report.model}, {report.dtype} on {report.device}\n{report.rule} (dashed)", fontsize="medium")
    axes.legend()
    figure.savefig(path)


def _figure() -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install outpace[bench]") from None
    return Figure(figsize=(9, 5), layout="constrained")
