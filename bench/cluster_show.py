"""Tables and picture of docs/scaling.md, of what bench/cluster.py has simulated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cluster_model import BETWEEN, PIPELINE, Replica
from bench.cluster_nodes import MODELS, Choice

NODES = (1, 10, 100, 1000)
LIMITS = (0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4)  # seconds between tokens


def tables(found: Sequence[Choice]) -> str:
    """Of the document, in Markdown."""
    return "\n\n".join((_rates_table(found), _nodes_table(found), _stages_table(found))) + "\n"


def _rates_table(found: Sequence[Choice]) -> str:
    heads = (
        "model",
        "layout",
        "requests",
        "first token, between, ms",
        *(f"{nodes:,} node{'s' * (nodes > 1)}" for nodes in NODES),
    )
    lines = _head(*heads, "$ a million", "a GPU's time", "without the limit: layout, $")
    for each in found:
        best, cheapest = each.best, max(each.every, key=lambda replica: replica.rate_of_gpu)
        rates = [each.cluster(nodes).rate for nodes in NODES]
        shares = sorted(best.shares.items(), key=lambda item: -item[1])[:3]
        spent = ", ".join(f"{name} {share:.0%}" for name, share in shares)
        lines.append(
            f"| {best.model}, {best.weights} | {best.layout} | {best.batch} | {1e3 * each.first_token:.0f}, "
            f"{1e3 * best.between:.0f} | {' | '.join(_rate(rate) for rate in rates)} | "
            f"{each.cluster(1000).dollars:.2f} | {spent} | {cheapest.layout}, {cheapest.dollars:.2f} |"
        )
    return "\n".join(lines)


def _nodes_table(found: Sequence[Choice]) -> str:
    some = [each for each in found if each.best.weights == "bf16"]
    names = [each.best.model.rpartition("-")[0 if "qwen" in each.best.model else 2] for each in some]
    heads = ("nodes", "failures a day", "spare nodes", f"router cores: {', '.join(names)}")
    lines = _head(*heads, f"first start of all, s: {', '.join(names)}")
    for nodes in NODES:
        rows = [each.cluster(nodes) for each in some]
        cores = ", ".join(f"{row.routers_needed:,}" for row in rows)
        starts = ", ".join(f"{row.first_start:,.0f}" for row in rows)
        lines.append(f"| {nodes:,} | {rows[0].failures_a_day:.3f} | {rows[0].spares} | {cores} | {starts} |")
    return "\n".join(lines)


def _stages_table(found: Sequence[Choice]) -> str:
    lines = _head("model", *(f"PP {pp}" for pp in PIPELINE))
    for each in found:
        cells = [_stage(each.by_stages.get(pp)) for pp in PIPELINE]
        lines.append(f"| {each.best.model}, {each.best.weights} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _stage(replica: Replica | None) -> str:
    if replica is None or replica.between > BETWEEN:
        return "-"
    waits = replica.shares["waiting for stages"]
    return f"TP {replica.layout.tp}: {replica.rate_of_gpu:,.0f}" + (f" ({waits:.1%})" if replica.layout.pp > 1 else "")


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _rate(rate: float) -> str:
    return f"{rate / 1e6:,.2f} M" if rate >= 1e6 else f"{rate / 1e3:,.1f} k"


def plot(found: Sequence[Choice], waits: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens/s by nodes, what a GPU's time is spent on, dollars by the time between tokens, first tokens by load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    some = [each for each in found if each.best.weights == "bf16"]
    colours = dict(zip(MODELS, ("#2171b5", "#238b45", "#cb181d", "#6a51a3"), strict=True))
    _plot_rates(axes[0, 0], found, colours)
    _plot_shares(axes[0, 1], found)
    _plot_limits(axes[1, 0], some, colours)
    _plot_waits(axes[1, 1], waits)
    for each in axes.flat:
        each.grid(alpha=0.3)
    figure.suptitle("Simulated: pipeline x tensor parallelism x replicas on nodes of 8 H200, 1,000 + 1,000 tokens")
    figure.savefig(path, dpi=100)


def _plot_rates(axes: Any, found: Sequence[Choice], colours: Mapping[str, str]) -> None:
    for each in found:
        best = each.best
        rates = [each.cluster(nodes).rate for nodes in NODES]
        style = "o-" if best.weights == "bf16" else "s:"
        label = f"{best.model}, {best.weights}, {best.layout}: ${each.cluster(1000).dollars:.2f} a million"
        axes.plot(NODES, rates, style, color=colours[best.model], label=label)
    axes.axhline(1 / found[0].cluster(1).core_seconds, color="black", linestyle="--", linewidth=0.8)
    text = "what one router process passes on"
    axes.text(NODES[-1], 0.6 / found[0].cluster(1).core_seconds, text, fontsize=8, ha="right")
    axes.set(xscale="log", yscale="log", xlabel="nodes", title="Output tokens/s, failures included", ylim=(400, 2e10))
    axes.legend(fontsize=7, loc="upper left")


def _plot_shares(axes: Any, found: Sequence[Choice]) -> None:
    names = [f"{each.best.model}, {each.best.weights}\n{each.best.layout}" for each in found]
    left = [0.0] * len(found)
    kinds = ("weights", "products", "cache", "fixed", "all-reduce", "waiting for stages")
    palette = ("#2171b5", "#cb181d", "#fd8d3c", "#969696", "#41ab5d", "#000000")
    for kind, colour in zip(kinds, palette, strict=True):
        shares = [each.best.shares[kind] for each in found]
        axes.barh(names, shares, left=left, color=colour, label=kind)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of the time of a GPU", title="What binds: where the time goes", xlim=(0, 1))
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.4, -0.11), columnspacing=0.8)


def _plot_limits(axes: Any, some: Sequence[Choice], colours: Mapping[str, str]) -> None:
    for each in some:
        colour = colours[each.best.model]
        points = {limit: each.within(limit) for limit in LIMITS}
        found = {limit: replica for limit, replica in points.items() if replica is not None}
        costs = [replica.dollars for replica in found.values()]
        axes.plot([1e3 * limit for limit in found], costs, "o-", color=colour, label=f"{each.best.model}, bf16")
        before = None
        for limit, replica in found.items():
            if replica.layout != before:
                before, text = replica.layout, f"{replica.layout.pp} x {replica.layout.tp}"
                point = {"textcoords": "offset points", "xytext": (3, 5), "fontsize": 7, "color": colour}
                axes.annotate(text, (1e3 * limit, replica.dollars), **point)
    axes.set(xscale="log", yscale="log", xlabel="ms between tokens that are allowed (points: PP x TP)")
    axes.set_title("$ for a million output tokens, by the limit between tokens")
    axes.set_xticks([1e3 * limit for limit in LIMITS], [f"{1e3 * limit:.0f}" for limit in LIMITS])
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper right")


def _plot_waits(axes: Any, waits: Sequence[Mapping[str, Any]]) -> None:
    ways = [*dict.fromkeys(row["way"] for row in waits)]
    for name, colour in zip(ways, ("#969696", "#9ecae1", "#08519c", "#cb181d", "#fd8d3c"), strict=True):
        rows = [row for row in waits if row["way"] == name]
        loads = [row["load"] for row in rows]
        axes.plot(loads, [row["P95 s"] for row in rows], "o-", color=colour, label=f"{name}: P95")
        axes.plot(loads, [row["P50 s"] for row in rows], ":", color=colour)
    axes.set(yscale="log", xlabel="load, of what the replicas can do", ylabel="s (dotted: P50)")
    axes.set_title(f"Time to the first token: {waits[0]['model']}")
    axes.legend(fontsize=7)
