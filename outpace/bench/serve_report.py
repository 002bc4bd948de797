"""What `outpace bench serve` found, as tables and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from outpace.bench.serve import FASTGEN_PROMPT, Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCIES = (
    ("ttft", "first token"),
    ("tpot", "a token but the first"),
    ("itl", "between pieces"),
    ("e2el", "whole request"),
)
BLUE, RED, GREY = "#2171b5", "#cb181d", "#737373"


def run_table(found: Figures, workload: str) -> Table:
    """One run."""
    table = _table(f"{found['model_id']}: {workload}, {pace_of(found)}", ("", ""))
    for label, key, style in (
        ("requests that ended well", "completed", ",d"),
        ("requests that failed", "failed", ",d"),
        ("most at once", "max_concurrent_requests", ",d"),
        ("seconds", "duration", ",.2f"),
        ("prompt tokens", "total_input_tokens", ",d"),
        ("output tokens", "total_output_tokens", ",d"),
        ("requests/s", "request_throughput", ",.2f"),
        ("output tokens/s", "output_throughput", ",.1f"),
        ("output tokens/s, the best second", "max_output_tokens_per_s", ",.1f"),
        ("all tokens/s", "total_token_throughput", ",.1f"),
    ):
        table.add_row(label, format(found[key], style))
    if found["request_goodput"] is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in found["goodput_sla_ms"].items())
        table.add_row(f"requests/s within {limits} ms", f"{found['request_goodput']:,.2f}")
    rates = found["effective_throughput"]
    named = f"requests/s with {FASTGEN_PROMPT:.0f} prompt and {'/'.join(rates)} new tokens/s"
    table.add_row(named, "  ".join(f"{value:,.2f}" for value in rates.values()))
    for name, label in LATENCIES:
        spread = [found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")]
        table.add_row(f"{label}, ms: mean, median, P99", "  ".join(f"{value:,.1f}" for value in spread))
    return table


def sweep_table(points: Sequence[Figures], workload: str) -> Table:
    """A row for each rate."""
    latencies = ("TTFT", "P99", "TPOT", "P99", "failed")
    title = f"{points[0]['model_id']}: {workload}; requests/s; medians and P99 in ms"
    table = _table(title, ("asked", "done", "good", "FastGen 4", "tokens/s", *latencies))
    for point in points:
        good = point["request_goodput"]
        table.add_row(
            str(point["request_rate"]),
            f"{point['request_throughput']:,.2f}",
            "" if good is None else f"{good:,.2f}",
            f"{point['effective_throughput']['4']:,.2f}",
            *(f"{point[key]:,.1f}" for key in ("output_throughput", "median_ttft_ms", "p99_ttft_ms")),
            *(f"{point[key]:,.1f}" for key in ("median_tpot_ms", "p99_tpot_ms")),
            str(point["failed"]),
        )
    return table


def pace_of(found: Figures) -> str:
    """When requests were sent, in words."""
    rate, most = found["request_rate"], found["max_concurrency"]
    when = "all at once" if rate == "inf" else f"{rate:g} a second ({found['arrival']})"
    return when if most is None else f"{when}, {most} at a time"


def plot_run(found: Figures, path: Path) -> None:
    """How the latencies of one run are distributed."""
    figure, (left, right) = _figure(2)
    good = [place for place, error in enumerate(found["errors"]) if not error]
    ttfts = [1e3 * found["ttfts"][place] for place in good]
    gaps = [1e3 * gap for place in good for gap in found["itls"][place]]
    for axes, values, label in ((left, ttfts, "time to the first token, ms"), (right, gaps, "time between pieces, ms")):
        ordered = sorted(values)
        axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post", color=BLUE)
        axes.set_xlabel(label)
        axes.set_ylabel("share that took no longer")
        axes.set_xlim(left=0)
    _save(figure, (left, right), f"{found['model_id']}: {pace_of(found)}", path)


def plot_sweep(points: Sequence[Figures], path: Path) -> None:
    """Latency against throughput, a point for each rate."""
    figure, (left, right) = _figure(2)
    rates = [point["request_throughput"] for point in points]
    for axes, name, label in ((left, "ttft", "time to the first token, ms"), (right, "tpot", "time of a token, ms")):
        for kind, colour in (("median", BLUE), ("p99", RED)):
            values = [point[f"{kind}_{name}_ms"] for point in points]
            axes.plot(rates, values, "o-", color=colour, label="P99" if kind == "p99" else kind)
        for point, rate in zip(points, rates, strict=True):
            place = (rate, point[f"median_{name}_ms"])
            axes.annotate(str(point["request_rate"]), place, textcoords="offset points", xytext=(4, -12), color=GREY)
        axes.set_xlabel("requests/s that ended (grey: requests/s that were asked for)")
        axes.set_ylabel(label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,g}")
        axes.legend()
    _save(figure, (left, right), f"{points[0]['model_id']}: latency against throughput", path)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _figure(columns: int) -> "tuple[Figure, tuple[Axes, ...]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    return figure, tuple(figure.subplots(1, columns))


def _save(figure: "Figure", parts: "Sequence[Axes]", title: str, path: Path) -> None:
    for axes in parts:
        axes.grid(alpha=0.3)
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
