"""Draws results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outpace.bench.figures import SPLIT, WHOLE, Figures
from outpace.bench.tables import pace_of
from outpace.errors import ConfigError, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outpace.bench.cost import Cost
    from outpace.kernels.limits import Speed

FORMATS = (".png", ".svg", ".pdf")
BLUE, RED = "#2171b5", "#cb181d"


def check_plot(path: Path) -> None:
    """Raise if matplotlib is missing or the file name is wrong, before anything is measured."""
    canvas()
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"plot: {path.name} must end in one of {', '.join(FORMATS)}")


def canvas(width: float = 9, height: float = 5.5) -> "Figure":
    """An empty picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install outpace[bench]") from None
    return Figure(figsize=(width, height), layout="constrained")


def plot_throughput(points: Sequence[Figures], cost: "Cost | None", speed: "Speed", path: Path) -> None:
    """Output tokens/s against the median inter-token latency, a point for each number of requests in flight."""
    facts = points[-1]["outpace"]
    levels = [point["outpace"]["concurrency"] for point in points]
    latency = "median time between tokens, ms (the number at a point: requests in flight)"
    title = f"{facts['model']} in {facts['dtype']} on {facts['device']}"
    with _picture(path, title, latency, "output tokens/s", logarithmic="xy") as axes:
        _curve(axes, points, "median_itl_ms", "output_throughput", levels, color=BLUE, label="measured")
        if cost is not None:
            context = facts["mean_context"]
            sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, *levels})
            steps = [(size, cost.decode_seconds(size, context, speed)) for size in sizes if size <= max(levels)]
            label = f"limit of a decode step, {context:.0f} tokens of context"
            axes.plot([1e3 * took for _, took in steps], [size / took for size, took in steps], "k--", label=label)


def plot_splitfuse(found: Figures, path: Path) -> None:
    """The distribution of the times between the decoders' tokens, with SplitFuse and with whole prompts."""
    facts, ratio = found["outpace"], found["throughput_ratio"]
    title = (
        f"Decodes beside long prompts: {facts['model']} on {facts['device']}\n"
        f"SplitFuse has {ratio:.2f} times the tokens/s of whole prompts"
    )
    latency = "time between tokens of a decoding request, ms"
    with _picture(path, title, latency, "share of tokens that took no longer") as axes:
        for name, colour in ((SPLIT, BLUE), (WHOLE, RED)):
            label = f"{name}: P50 {found[name]['p50_itl_ms']:.1f} ms, P95 {found[name]['p95_itl_ms']:.1f} ms"
            _distribution(axes, found[name]["itls_ms"], color=colour, label=label)


def plot_steps(lines: Mapping[str, Mapping[int, float]], title: str, path: Path) -> None:
    """Milliseconds of a decode step by its requests, a line for each system; limits are dashed."""
    with _picture(path, title, "requests in a decode step", "ms a step", logarithmic="xy") as axes:
        for name, points in lines.items():
            style = "--" if name.startswith("limit") else "o-"
            axes.plot([*points], [*points.values()], style, label=name)


def plot_pipeline(found: Figures, path: Path) -> None:
    """When each stage computed: a row for each, a bar with its number for each micro-batch; idle time is hatched."""
    ours, timeline = found["outpace"], found["timeline"]
    figure = canvas(max(9, 0.6 * ours["micro_batches"]), 2.2 + 0.7 * len(timeline))
    axes = figure.subplots()
    every = [span for spans in timeline.values() for span in spans]
    zero, last = min(span[1] for span in every), max(span[2] for span in every)
    axes.barh([*timeline], last - zero, height=0.8, color="white", edgecolor="#cccccc", hatch="////")
    for stage, spans in timeline.items():
        for place, (_, begin, end, *_) in enumerate(spans):
            colour = "#6baed6" if place % 2 else BLUE
            axes.barh(stage, end - begin, left=begin - zero, height=0.8, color=colour, edgecolor="white")
            axes.text((begin + end) / 2 - zero, stage, str(place + 1), ha="center", va="center", color="white")
    axes.set_title(
        f"{ours['model']} on {ours['device']}: {ours['pp']} stages, {ours['micro_batches']} micro-batches of "
        f"{ours['tokens']} tokens\nidle {found['bubble']:.1%}, by (pp-1)/(m+pp-1) {found['bubble_formula']:.1%}; "
        f"{found['speedup']:.2f} times as fast as one process, ideal {found['ideal_speedup']:.2f}",
        loc="left",
    )
    names = [f"stage {stage}" for stage in timeline]
    axes.set(yticks=[*timeline], yticklabels=names, xlabel="s (hatched: idle)", xlim=(0, last - zero))
    axes.invert_yaxis()
    figure.savefig(path, dpi=130)


def plot_served(points: Sequence[Figures], path: Path, *, is_sweep: bool) -> None:
    """Load on a server: the distribution of latencies of one run, or latency against throughput of a sweep."""
    figure, found = canvas(11, 4.8), points[0]
    left, right = figure.subplots(1, 2)
    if is_sweep:
        title = "latency against throughput"
        for axes, name, label in ((left, "ttft", "time to the first token, ms"), (right, "tpot", "time per token, ms")):
            rates = [point["request_rate"] for point in points]
            _curve(axes, points, "request_throughput", f"median_{name}_ms", rates, color=BLUE, label="median")
            _curve(axes, points, "request_throughput", f"p99_{name}_ms", color=RED, label="P99")
            axes.set(xlabel="requests/s that ended (at a point: requests/s that were asked for)", ylabel=label)
            _logarithmic(axes, "y")
    else:
        title = pace_of(found)
        good = [place for place, error in enumerate(found["errors"]) if not error]
        gaps = [gap for place in good for gap in found["itls"][place]]
        _distribution(left, [1e3 * found["ttfts"][place] for place in good], color=BLUE)
        _distribution(right, [1e3 * gap for gap in gaps], color=BLUE)
        left.set(xlabel="time to the first token, ms", ylabel="share that took no longer")
        right.set(xlabel="time between events, ms", ylabel="share that took no longer")
    figure.suptitle(f"{found['model_id']}: {title}", x=0.01, ha="left")
    _save(figure, path, legend="best")


def _curve(axes: "Axes", points: Sequence[Figures], x: str, y: str, names: Sequence[object] = (), **style: Any) -> None:
    """Draw one figure of each point against another, with names at the points."""
    places = [(point[x], point[y]) for point in points]
    axes.plot(*zip(*places, strict=True), "o-", **style)
    for name, place in zip(names, places, strict=False):
        axes.annotate(str(name), place, textcoords="offset points", xytext=(6, -10), fontsize="small")


def _distribution(axes: "Axes", values: Sequence[float], **style: Any) -> None:
    """Draw a cumulative distribution."""
    shares = [(place + 1) / len(values) for place in range(len(values))]
    axes.step(sorted(values), shares, where="post", **style)
    axes.set_xlim(left=0)


@contextmanager
def _picture(path: Path, title: str, x: str, y: str, logarithmic: str = "") -> "Iterator[Axes]":
    """Axes to draw on, saved in the end."""
    figure = canvas()
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left")
    yield axes
    _logarithmic(axes, logarithmic)
    _save(figure, path)


def _logarithmic(axes: "Axes", which: str) -> None:
    """Logarithmic axes with plain numbers, not powers of ten."""
    from matplotlib.ticker import LogFormatter

    for name in which:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.7)))


def _save(figure: "Figure", path: Path, legend: Literal["lower right", "best"] = "lower right") -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc=legend)
    figure.savefig(path, dpi=130)
