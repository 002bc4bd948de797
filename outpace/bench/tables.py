"""Figures as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from outpace.bench.figures import Figures
from outpace.bench.splitfuse import PERCENTS, SPLIT, WHOLE

MIB = 1 << 20
BUSY = 0.25  # cores that other programs may use before figures count as too low


def throughput_table(found: Figures, workload: str) -> Table:
    """One run."""
    ours = found["outpace"]
    table = _table(ours, workload, [f"{ours['concurrency']} at a time"])

    def row(name: str, key: str, style: str = ",.1f") -> None:
        table.add_row(name, format(found[key], style))

    row("requests", "num_requests", ",d")
    row("prompt tokens", "total_input_tokens", ",d")
    row("output tokens", "total_output_tokens", ",d")
    row("seconds", "elapsed_time", ".2f")
    row("requests/s", "request_throughput", ",.2f")
    row("output tokens/s", "output_throughput")
    row("all tokens/s", "total_token_throughput")
    for name, label in (("ttft", "first token"), ("tpot", "a token of a request"), ("itl", "between tokens")):
        spread = [found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")]
        table.add_row(f"{label}, ms: mean, median, P99", "  ".join(f"{value:,.1f}" for value in spread))
    table.add_row("limit, output tokens/s", _known(ours["limit"] and ours["limit"]["output_throughput"], ",.0f"))
    table.add_row("of the limit", _known(ours["ratio"], ".3f"))
    if ours.get("experts_touched"):
        table.add_row(_touched(ours), f"{ours['experts_touched']:.1f}")
    return table


def sweep_table(points: Sequence[Figures], workload: str) -> Table:
    """A row for each number of requests in flight."""
    names = ("tokens/s", "first, ms", "between, ms", "its P99", "limit", "of limit")
    table = _table(points[-1]["outpace"], f"{workload}; output tokens/s, medians", names, first="in flight")
    keys = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms")
    for point in points:
        ours = point["outpace"]
        limit = ours["limit"] and ours["limit"]["output_throughput"]
        table.add_row(
            str(ours["concurrency"]),
            *(f"{point[key]:,.1f}" for key in keys),
            _known(limit, ",.0f"),
            _known(ours["ratio"], ".3f"),
        )
    return table


def latency_table(found: Figures) -> Table:
    """Decode and first token beside their limits."""
    ours = found["outpace"]
    what = f"{ours['batch_size']} x {ours['input_len']} prompt and {ours['output_len']} new tokens"
    table = _table(ours, what, ["measured", "limit", "of the limit"])
    limit = ours["limit"] or {"decode_tokens_per_second": None, "ttft_ms": None}
    table.add_row(
        "decode, tokens/s of a request",
        f"{found['decode_tokens_per_second']:,.1f}",
        _known(limit["decode_tokens_per_second"], ",.1f"),
        _known(ours["ratio"], ".3f"),
    )
    table.add_row(
        "first token, ms",
        f"{found['median_ttft_ms']:.2f}",
        _known(limit["ttft_ms"], ".2f"),
        _known(ours["ratio_ttft"], ".3f"),
    )
    table.add_row("whole request, ms", f"{found['avg_latency'] * 1e3:.1f}", "", "")
    if ours.get("experts_touched"):
        table.add_row(_touched(ours), f"{ours['experts_touched']:.1f}", "", "")
    return table


def splitfuse_table(found: Figures) -> Table:
    """Both ways beside each other."""
    ratios = f"P95 x {found['p95_itl_ratio']:.2f}, tokens/s x {found['throughput_ratio']:.2f}"
    table = _table(found["outpace"], f"decodes beside long prompts: {ratios}", [SPLIT, WHOLE])
    ways = [found[SPLIT], found[WHOLE]]
    for percent in PERCENTS:
        table.add_row(f"between tokens, P{percent} ms", *(f"{way[f'p{percent}_itl_ms']:.2f}" for way in ways))
    table.add_row("first token of a long prompt, ms", *(f"{way['median_ttft_ms']:.1f}" for way in ways))
    table.add_row("all tokens/s", *(f"{way['total_token_throughput']:,.0f}" for way in ways))
    table.add_row("output tokens/s", *(f"{way['output_throughput']:,.0f}" for way in ways))
    table.add_row("most tokens in a step", *(f"{way['max_num_batched_tokens']:,d}" for way in ways))
    table.add_row("most of one prompt beside decodes", *(f"{way['max_chunk_beside_decodes']:,d}" for way in ways))
    return table


def profile_table(found: Figures) -> Table:
    """The steps as a whole, then the longest kernels."""
    busy = "" if found["gpu_busy"] is None else f", GPU busy {found['gpu_busy']:.0%}"
    title = (
        f"a decode step of {found['batch_size']} requests: {found['step_us']:,.0f} us{busy}, "
        f"host {found['host_us_per_step']:,.0f} us"
    )
    table = Table(title=title, title_justify="left")
    for column in ("longest", "us in a step", "calls in a step"):
        table.add_column(column, justify="left" if column == "longest" else "right", overflow="fold")
    for kernel in found["longest"]:
        table.add_row(kernel["name"][:90], f"{kernel['us_per_step']:,.1f}", f"{kernel['calls_per_step']:.1f}")
    return table


def pipeline_table(found: Figures) -> Table:
    """The speed-up and the bubble, each beside its formula."""
    ours = found["outpace"]
    table = Table(
        title=f"{ours['model']} in {ours['dtype']} on {ours['device']}: {ours['pp']} stages, {ours['micro_batches']} "
        f"micro-batches of {ours['tokens']} tokens",
        title_justify="left",
        caption=_busy(ours["used_by_other_programs"])
        + f"best of {ours['turns']} turns each, by turns; every process has {_threads(ours['threads'])}",
        caption_justify="left",
    )
    for column in ("", "measured", "ideal", "of ideal"):
        table.add_column(column, justify="left" if column == "" else "right")
    speedup, ideal = found["speedup"], found["ideal_speedup"]
    table.add_row("one process, s", f"{min(found['one_process_seconds']):.2f}", "", "")
    table.add_row("pipeline, s", f"{min(found['pipeline_seconds']):.2f}", "", "")
    table.add_row("times as fast", f"{speedup:.3f}", f"{ideal:.3f}", f"{found['of_ideal']:.3f}")
    table.add_row("the same, median of the turns", f"{found['median_speedup']:.3f}", "", "")
    table.add_row("idle: bubble, (pp-1)/(m+pp-1)", f"{found['bubble']:.4f}", f"{found['bubble_formula']:.4f}", "")
    busy, formula = 1 - found["bubble"], 1 - found["bubble_formula"]
    table.add_row("computing", f"{busy:.4f}", f"{formula:.4f}", f"{busy / formula:.3f}")
    table.add_row("idle without fill and drain", f"{found['bubble_steady']:.4f}", "0", "")
    if (by_cpu := found["by_cpu_time"]) is not None:
        ratio = f"{by_cpu['of_ideal']:.3f}"
        table.add_row("by CPU time: times as fast", f"{by_cpu['speedup']:.3f}", f"{ideal:.3f}", ratio)
        table.add_row("by CPU time: bubble", f"{by_cpu['bubble']:.4f}", f"{found['bubble_formula']:.4f}", "")
    for stage, took in found["stage_ms"].items():
        table.add_row(f"stage {stage}, ms a micro-batch", f"{took:.1f}", "", "")
    return table


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _table(facts: dict[str, Any], what: str, columns: Sequence[str], first: str = "") -> Table:
    """An empty table that says under itself where this was measured."""
    parts = ", ".join(f"{part} {took:.2f}" for part, took in facts["startup_seconds"].items())
    table = Table(
        title=f"{facts['model']} in {facts['dtype']} on {facts['device']}: {what}",
        title_justify="left",
        caption=_busy(facts["used_by_other_programs"])
        + f"start-up, s: {parts}; peak memory {facts['peak_memory_bytes'] / MIB:,.0f} MiB; this device reads "
        f"{facts['read_bandwidth_gb_s']:,.1f} GB/s and computes {facts['matmul_gflop_s']:,.0f} GFLOP/s",
        caption_justify="left",
    )
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _busy(others: Mapping[str, float] | None) -> str:
    """A warning where other programs had so much of the machine that figures are too low."""
    if others is None or others["cores"] < BUSY:
        return ""
    return f"busy machine: other programs used {others['cores']:.1f} of {others['of']:.0f} cores, figures are too low; "


def _touched(ours: Mapping[str, Any]) -> str:
    return f"experts of a layer in a full step, {'counted' if ours['experts_counted'] else 'expected'}"


def _known(value: float | None, style: str) -> str:
    return "unknown" if value is None else format(value, style)
