"""The error of each layer as a picture."""

from pathlib import Path

from outpace.bench.plot import canvas
from outpace.verify.report import Report


def plot(report: Report, path: Path) -> None:
    """Draw the error by layer, a line for each set of prompts, and the allowed error as a dashed line."""
    figure = canvas(9, 5)
    axes = figure.subplots()
    for prompts in report.prompts:
        (line,) = axes.plot([place.error for place in prompts.places], marker=".", label=prompts.name)
        axes.plot([place.allowed for place in prompts.places], "--", color=line.get_color(), alpha=0.4)
    axes.set(yscale="log", xlabel="0 is the embedding, then the layers; the logits are last", ylabel="relative error")
    axes.set_title(f"{report.model}, {report.dtype} on {report.device}\n{report.rule} (dashed)", fontsize="medium")
    axes.legend()
    figure.savefig(path)
