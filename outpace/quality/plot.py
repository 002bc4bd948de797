"""The loss of each window as a picture, and how much two models differ there."""

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.bench.plot import BLUE, RED, canvas
from outpace.quality.report import Evaluation, Perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(found: Evaluation, path: Path) -> None:
    """Draw the loss of each window, of both models if there are two, with their difference below."""
    rows = 1 if found.against is None else 2
    figure = canvas(9, 1.5 + 2.5 * rows)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=(2, 1)[:rows])[:, 0]
    for each, colour in zip((found.model, found.against), (BLUE, RED), strict=True):
        if each is not None:
            name = f"{each.model}, {each.dtype}: perplexity {each.perplexity:,.2f}"
            _stairs(axes[0], each, [window.nats for window in each.windows], color=colour, label=name)
    title = f"{found.summary}\n{found.text}, windows of {found.window:,} tokens"
    axes[0].set_title(title, loc="left", fontsize="medium")
    axes[0].set_ylabel("loss, nats per token")
    axes[0].legend(fontsize="small")
    if found.against is not None:
        pairs = zip(found.model.windows, found.against.windows, strict=True)
        _stairs(axes[1], found.model, [own.nats - other.nats for own, other in pairs], color="black")
        axes[1].axhline(0, color="grey", linewidth=0.8)
        axes[1].set_ylabel("difference")
    for each_axes in axes:
        each_axes.grid(alpha=0.3)
    axes[-1].set_xlabel("tokens of the text that were predicted")
    figure.savefig(path, dpi=130)


def _stairs(axes: "Axes", found: Perplexity, values: list[float], color: str, label: str | None = None) -> None:
    """A level for each window, as wide as it has tokens."""
    edges = [0, *accumulate(window.tokens for window in found.windows)]
    axes.stairs(values, edges, baseline=None, linewidth=1.6, color=color, label=label)
