"""Draws a run: latencies under overload, and memory, files and threads over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.bench.plot import canvas


def draw(details: Mapping[str, Any], path: Path) -> None:
    """Draw three panels; those of rows that have not run stay empty."""
    figure = canvas(15, 4.2)
    latency, memory, files = figure.subplots(1, 3)
    for name, colour in (("accepted", "#4292c6"), ("rejected", "#d94801")):
        points = details.get("overload", {}).get(name, [])
        latency.scatter([x for x, _ in points], [y for _, y in points], s=3, color=colour, label=name)
    latency.axhline(0.1, color="grey", linewidth=0.8, linestyle=":")
    latency.set(yscale="log", xlabel="sent, s", ylabel="answered after, s", title="L-2: three times the capacity")
    for name, samples in details.get("processes", {}).items():
        seconds = [each["seconds"] for each in samples]
        memory.plot(seconds, [each["rss_mb"] for each in samples], label=name)
        files.plot(seconds, [each["fds"] for each in samples], label=f"{name}: open files")
        files.plot(seconds, [each["threads"] for each in samples], label=f"{name}: threads", linestyle=":")
    memory.set(xlabel="s", ylabel="MB", title="Resident memory", ylim=(0, None))
    files.set(yscale="symlog", xlabel="s", title="Open files and threads", ylim=(0, None))
    for axes in (memory, files):
        for second, row in details.get("rows at", []):
            axes.axvline(second, color="lightgrey", linewidth=0.8)
            axes.text(second, axes.get_ylim()[1], row, fontsize=7, rotation=90, va="top")
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, dpi=120)
