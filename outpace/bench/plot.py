"""Results as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.bench.cost import Cost
from outpace.bench.figures import Figures
from outpace.bench.splitfuse import SPLIT, WHOLE
from outpace.kernels.limits import Speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_throughput(points: Sequence[Figures], cost: Cost | None, speed: Speed, path: Path) -> None:
    """Output tokens/s against the median inter-token latency, a point for each number of requests in flight."""
    figure, axes = _figure()
    levels = [point["outpace"]["concurrency"] for point in points]
    latencies = [point["median_itl_ms"] for point in points]
    rates = [point["output_throughput"] for point in points]
    axes.plot(latencies, rates, "o-", color="#2171b5", label="measured")
    for level, latency, rate in zip(levels, latencies, rates, strict=True):
        axes.annotate(f"{level}", (latency, rate), textcoords="offset points", xytext=(6, -10), fontsize="small")
    if cost is not None:
        context = points[-1]["outpace"]["mean_context"]
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, *levels})
        steps = [(size, cost.decode_seconds(size, context, speed)) for size in sizes if size <= max(levels)]
        label = f"limit of a decode step, {context:.0f} tokens of context"
        axes.plot([1e3 * took for _, took in steps], [size / took for size, took in steps], "k--", label=label)
    facts = points[-1]["outpace"]
    axes.set_title(f"{facts['model']} in {facts['dtype']} on {facts['device']}", loc="left")
    axes.set_xlabel("median time between tokens, ms (the number at a point: requests in flight)")
    axes.set_ylabel("output tokens/s")
    _logarithmic(axes)
    _save(figure, axes, path)


def plot_splitfuse(found: Figures, path: Path) -> None:
    """How the times between the decoders' tokens are distributed, with SplitFuse and with whole prompts."""
    figure, axes = _figure()
    for name, colour in ((SPLIT, "#2171b5"), (WHOLE, "#cb181d")):
        gaps = sorted(found[name]["itls_ms"])
        shares = [(place + 1) / len(gaps) for place in range(len(gaps))]
        label = f"{name}: P50 {found[name]['p50_itl_ms']:.1f} ms, P95 {found[name]['p95_itl_ms']:.1f} ms"
        axes.step(gaps, shares, where="post", color=colour, label=label)
    facts = found["outpace"]
    axes.set_title(
        f"Decodes beside long prompts: {facts['model']} on {facts['device']}\nSplitFuse has "
        f"{found['throughput_ratio']:.2f} times the tokens/s of whole prompts",
        loc="left",
    )
    axes.set_xlabel("time between tokens of a decoding request, ms")
    axes.set_ylabel("share of tokens that took no longer")
    axes.set_xlim(left=0)
    _save(figure, axes, path)


def plot_steps(lines: Mapping[str, Mapping[int, float]], title: str, path: Path) -> None:
    """Milliseconds of a decode step by its requests, a line for each system; limits are dashed."""
    figure, axes = _figure()
    for name, points in lines.items():
        style = "k--" if name == "limit" else "--" if name.startswith("limit") else "o-"
        axes.plot([*points], [*points.values()], style, label=name)
    axes.set_title(title, loc="left")
    axes.set_xlabel("requests in a decode step")
    axes.set_ylabel("ms a step")
    _logarithmic(axes)
    _save(figure, axes, path)


def plot_pipeline(found: Figures, path: Path) -> None:
    """When each stage computed: a row for each, a bar with its number for each micro-batch; what is idle is hatched."""
    figure, axes = _figure()
    timeline = found["timeline"]
    figure.set_size_inches(max(9, 0.6 * found["outpace"]["micro_batches"]), 2.2 + 0.7 * len(timeline))
    every = [span for spans in timeline.values() for span in spans]
    zero, last = min(span[1] for span in every), max(span[2] for span in every)
    axes.barh([*timeline], last - zero, height=0.8, color="white", edgecolor="#cccccc", hatch="////")
    for stage, spans in timeline.items():
        for place, (_, begin, end, *_) in enumerate(spans):
            colour = "#6baed6" if place % 2 else "#2171b5"
            axes.barh(stage, end - begin, left=begin - zero, height=0.8, color=colour, edgecolor="white")
            axes.text((begin + end) / 2 - zero, stage, str(place + 1), ha="center", va="center", color="white")
    ours = found["outpace"]
    axes.set_title(
        f"{ours['model']} on {ours['device']}: {ours['pp']} stages, {ours['micro_batches']} micro-batches of "
        f"{ours['tokens']} tokens\nidle {found['bubble']:.1%}, by (pp-1)/(m+pp-1) {found['bubble_formula']:.1%}; "
        f"{found['speedup']:.2f} times as fast as one process, ideal {found['ideal_speedup']:.2f}",
        loc="left",
    )
    axes.set(
        yticks=[*timeline],
        yticklabels=[f"stage {stage}" for stage in timeline],
        xlabel="s (hatched: idle)",
        xlim=(0, last - zero),
    )
    axes.invert_yaxis()
    figure.savefig(path, dpi=130)


def _figure() -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    return figure, figure.subplots()


def _logarithmic(axes: "Axes") -> None:
    """Both axes, with numbers that people read."""
    from matplotlib.ticker import LogFormatter

    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.7)))


def _save(figure: "Figure", axes: "Axes", path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
