"""Draws a quantization plan: the scheme of each weight, and the estimated cost of quantizing it."""

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.quant.plan import PlannedWeight, QuantPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[str, str] = {
    "int4": "#9ecae1",
    "int8": "#2171b5",
    "fp8": "#6a51a3",
    "w8a8": "#238b45",
    "as it is": "#cb181d",
}
_NUMBER = re.compile(r"\.(\d+)\.")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(plan: QuantPlan, path: Path) -> None:
    """Draw the scheme of each weight, one row for each kind; below, the estimated loss of the worst scheme."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    kinds = list(dict.fromkeys(_kind(weight) for weight in plan.weights))
    layers = 1 + max(_layer(weight) for weight in plan.weights)
    size = (max(7.0, min(24.0, 3 + 0.25 * layers)), 2.5 + 0.35 * len(kinds) + 3)
    figure = Figure(figsize=size, layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(max(1.0, 0.35 * len(kinds)), 2.5))
    for weight in plan.weights:
        row = kinds.index(_kind(weight))
        corner = (_layer(weight) - 0.45, row - 0.42)
        top.add_patch(Rectangle(corner, 0.9, 0.84, color=COLOURS[_got(weight)]))
    top.set_yticks(range(len(kinds)), kinds, fontsize="small")
    top.set_ylim(len(kinds) - 0.5, -0.5)
    top.set_xlim(-0.6, layers - 0.4)
    shown = [name for name in COLOURS if any(_got(weight) == name for weight in plan.weights)]
    top.legend(handles=[Patch(color=COLOURS[name], label=name) for name in shown], fontsize="small", ncols=len(shown),
               loc="lower right", bbox_to_anchor=(1, 1))  # fmt: skip
    top.set_title("\n".join([plan.summary, *plan.measured]), loc="left", fontsize="medium", pad=24)
    _sensitivity(below, plan, kinds)
    figure.savefig(path, dpi=130)


def _sensitivity(axes: "Axes", plan: QuantPlan, kinds: list[str]) -> None:
    for kind in kinds:
        points = [
            (_layer(weight), 100 * math.expm1(min(50, max(weight.estimates.values()))))
            for weight in plan.weights
            if _kind(weight) == kind and weight.estimates
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=kind)
    if any(value > 0 for weight in plan.weights for value in weight.estimates.values()):
        axes.set_yscale("log", nonpositive="clip")
    axes.set_ylabel("% of perplexity that the\nworst scheme adds, by estimate")
    axes.set_xlabel("layer")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _got(weight: PlannedWeight) -> str:
    scheme = weight.scheme
    if scheme is None:
        return "as it is"
    return "w8a8" if scheme.activations == "int8" else scheme.values


def _layer(weight: PlannedWeight) -> int:
    """The number of its layer; 0 for weights outside of layers."""
    found = _NUMBER.search(weight.names[0])
    return int(found[1]) if found else 0


def _kind(weight: PlannedWeight) -> str:
    """Its name without the number of the layer and the common prefix."""
    names = [_NUMBER.split(name.removesuffix(".weight"), maxsplit=1)[-1] for name in weight.names]
    return ", ".join([names[0], *(name.rpartition(".")[2] for name in names[1:])][:4])
