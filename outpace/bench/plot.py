"""Results as pictures."""

from collections.abc import Mapping, Sequence
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
BLUE, RED, GREY = "#2171b5", "#cb181d", "#737373"


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before anything has run for it."""
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
    figure, axes = _one()
    facts = points[-1]["outpace"]
    levels = [point["outpace"]["concurrency"] for point in points]
    latencies = [point["median_itl_ms"] for point in points]
    rates = [point["output_throughput"] for point in points]
    axes.plot(latencies, rates, "o-", color=BLUE, label="measured")
    for level, latency, rate in zip(levels, latencies, rates, strict=True):
        axes.annotate(f"{level}", (latency, rate), textcoords="offset points", xytext=(6, -10), fontsize="small")
    if cost is not None:
        context = facts["mean_context"]
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, *levels})
        steps = [(size, cost.decode_seconds(size, context, speed)) for size in sizes if size <= max(levels)]
        label = f"limit of a decode step, {context:.0f} tokens of context"
        axes.plot([1e3 * took for _, took in steps], [size / took for size, took in steps], "k--", label=label)
    axes.set_title(f"{facts['model']} in {facts['dtype']} on {facts['device']}", loc="left")
    axes.set_xlabel("median time between tokens, ms (the number at a point: requests in flight)")
    axes.set_ylabel("output tokens/s")
    _logarithmic(axes, "both")
    _save(figure, path)


def plot_splitfuse(found: Figures, path: Path) -> None:
    """The distribution of the times between the decoders' tokens, with SplitFuse and with whole prompts."""
    figure, axes = _one()
    for name, colour in ((SPLIT, BLUE), (WHOLE, RED)):
        label = f"{name}: P50 {found[name]['p50_itl_ms']:.1f} ms, P95 {found[name]['p95_itl_ms']:.1f} ms"
        _distribution(axes, found[name]["itls_ms"], color=colour, label=label)
    facts, ratio = found["outpace"], found["throughput_ratio"]
    axes.set_title(
        f"Decodes beside long prompts: {facts['model']} on {facts['device']}\n"
        f"SplitFuse has {ratio:.2f} times the tokens/s of whole prompts",
        loc="left",
    )
    axes.set_xlabel("time between tokens of a decoding request, ms")
    axes.set_ylabel("share of tokens that took no longer")
    _save(figure, path)


def plot_steps(lines: Mapping[str, Mapping[int, float]], title: str, path: Path) -> None:
    """Milliseconds of a decode step by its requests, a line for each system; limits are dashed."""
    figure, axes = _one()
    for name, points in lines.items():
        style = "k--" if name == "limit" else "--" if name.startswith("limit") else "o-"
        axes.plot([*points], [*points.values()], style, label=name)
    axes.set_title(title, loc="left")
    axes.set_xlabel("requests in a decode step")
    axes.set_ylabel("ms a step")
    _logarithmic(axes, "both")
    _save(figure, path)


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
        _against_throughput(left, points, "ttft", "time to the first token, ms")
        _against_throughput(right, points, "tpot", "time per token, ms")
        title = "latency against throughput"
    else:
        good = [place for place, error in enumerate(found["errors"]) if not error]
        gaps = [1e3 * gap for place in good for gap in found["itls"][place]]
        _distribution(left, [1e3 * found["ttfts"][place] for place in good], color=BLUE)
        _distribution(right, gaps, color=BLUE)
        left.set(xlabel="time to the first token, ms", ylabel="share that took no longer")
        right.set(xlabel="time between events, ms", ylabel="share that took no longer")
        title = pace_of(found)
    figure.suptitle(f"{found['model_id']}: {title}", x=0.01, ha="left")
    _save(figure, path, legend="best")


def _against_throughput(axes: "Axes", points: Sequence[Figures], name: str, label: str) -> None:
    rates = [point["request_throughput"] for point in points]
    for kind, key, colour in (("median", "median", BLUE), ("P99", "p99", RED)):
        axes.plot(rates, [point[f"{key}_{name}_ms"] for point in points], "o-", color=colour, label=kind)
    for point, rate in zip(points, rates, strict=True):
        place = (rate, point[f"median_{name}_ms"])
        axes.annotate(str(point["request_rate"]), place, textcoords="offset points", xytext=(4, -12), color=GREY)
    axes.set_xlabel("requests/s that ended (grey: requests/s that were asked for)")
    axes.set_ylabel(label)
    _logarithmic(axes, "y")


def _distribution(axes: "Axes", values: Sequence[float], **style: Any) -> None:
    """The share of values that are no larger."""
    shares = [(place + 1) / len(values) for place in range(len(values))]
    axes.step(sorted(values), shares, where="post", **style)
    axes.set_xlim(left=0)


def _one() -> "tuple[Figure, Axes]":
    figure = canvas()
    return figure, figure.subplots()


def _logarithmic(axes: "Axes", which: str) -> None:
    """Logarithmic axes, with numbers that people read."""
    from matplotlib.ticker import LogFormatter

    for name in ("x", "y") if which == "both" else which:
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
