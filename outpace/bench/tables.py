"""Prints figures as tables. A table is data: the figure and the format of each line."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich.table import Table

from outpace.bench.figures import FASTGEN_PROMPT, SPLIT, WHOLE, Figures

MIB = 1 << 20
TITLE = 64  # most characters of a title for which a narrow table is widened
BUSY = 0.25  # cores that other programs may use before figures count as too low


class TableLine(NamedTuple):
    """A figure in a table: a line if there is one result, a column if there are several."""

    name: str
    key: str
    """Its path in the figures, such as outpace.limit.seconds. Several keys share a cell."""
    style: str = ",.1f"
    limit: str = ""
    """Key of its limit on this machine."""
    ratio: str = ""
    """Key of the part of the limit that it reaches."""


def _spreads(**names: str) -> tuple[TableLine, ...]:
    keys = "mean_{0}_ms median_{0}_ms p99_{0}_ms"
    return tuple(TableLine(f"{name}, ms: mean, median, P99", keys.format(key)) for key, name in names.items())


SHARED = (
    TableLine("seconds", "duration", ",.2f"),
    TableLine("prompt tokens", "total_input_tokens", ",d"),
    TableLine("output tokens", "total_output_tokens", ",d"),
    TableLine("requests/s", "request_throughput", ",.2f"),
    TableLine("output tokens/s", "output_throughput"),
    TableLine("all tokens/s", "total_token_throughput"),
)
THROUGHPUT = (
    TableLine("requests", "num_requests", ",d"),
    *SHARED,
    *_spreads(ttft="first token", tpot="each later token", itl="between tokens"),
    TableLine("limit, output tokens/s", "outpace.limit.output_throughput", ",.0f"),
    TableLine("of the limit", "outpace.ratio", ".3f"),
)
LEVELS = (
    TableLine("in flight", "outpace.concurrency", "d"),
    TableLine("tokens/s", "output_throughput"),
    TableLine("first, ms", "median_ttft_ms"),
    TableLine("between, ms", "median_itl_ms"),
    TableLine("its P99", "p99_itl_ms"),
    TableLine("limit", "outpace.limit.output_throughput", ",.0f"),
    TableLine("of limit", "outpace.ratio", ".3f"),
)
LATENCY = (
    TableLine("decode, tokens/s of a request", "decode_tokens_per_second", ",.1f",
         "outpace.limit.decode_tokens_per_second", "outpace.ratio"),
    TableLine("first token, ms", "median_ttft_ms", ".2f", "outpace.limit.ttft_ms", "outpace.ratio_ttft"),
    TableLine("whole request, ms", "avg_latency_ms", ".1f"),
)  # fmt: skip
SPLITFUSE = (
    *(TableLine(f"between tokens, P{percent} ms", f"p{percent}_itl_ms", ".2f") for percent in (50, 95, 99)),
    TableLine("first token of a long prompt, ms", "median_ttft_ms"),
    TableLine("all tokens/s", "total_token_throughput", ",.0f"),
    TableLine("output tokens/s", "output_throughput", ",.0f"),
    TableLine("most tokens in a step", "max_num_batched_tokens", ",d"),
    TableLine("most of one prompt beside decodes", "max_chunk_beside_decodes", ",d"),
)
KERNELS = (
    TableLine("longest", "name", ""),
    TableLine("us per step", "us_per_step"),
    TableLine("calls per step", "calls_per_step", ".1f"),
)
PIPELINE = (
    TableLine("one process, s", "alone", ".2f"),
    TableLine("pipeline, s", "best", ".2f"),
    TableLine("times as fast", "speedup", ".3f", "ideal_speedup", "of_ideal"),
    TableLine("the same, median of the turns", "median_speedup", ".3f"),
    TableLine("idle: bubble, (pp-1)/(m+pp-1)", "bubble", ".4f", "bubble_formula"),
    TableLine("computing", "busy", ".4f", "busy_formula", "busy_ratio"),
    TableLine("idle without fill and drain", "bubble_steady", ".4f", "zero"),
    TableLine("by CPU time: times as fast", "by_cpu_time.speedup", ".3f", "ideal_speedup", "by_cpu_time.of_ideal"),
    TableLine("by CPU time: bubble", "by_cpu_time.bubble", ".4f", "bubble_formula"),
)
SERVED = (
    TableLine("requests that succeeded", "completed", ",d"),
    TableLine("requests that failed", "failed", ",d"),
    TableLine("most in flight", "max_concurrent_requests", ",d"),
    *SHARED,
    TableLine("output tokens/s, the best second", "max_output_tokens_per_s"),
)
LATENCIES = _spreads(ttft="first token", tpot="each later token", itl="between events", e2el="whole request")
RATES = (
    TableLine("asked", "request_rate", ""),
    TableLine("done", "request_throughput", ",.2f"),
    TableLine("good", "request_goodput", ",.2f"),
    TableLine("FastGen 4", "effective_throughput.4", ",.2f"),
    TableLine("tokens/s", "output_throughput"),
    TableLine("TTFT", "median_ttft_ms"),
    TableLine("P99", "p99_ttft_ms"),
    TableLine("TPOT", "median_tpot_ms"),
    TableLine("P99", "p99_tpot_ms"),
    TableLine("failed", "failed", ""),
)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str | None = None,
    justify: Literal["left", "right"] = "right",
) -> Table:
    """Draw a table, with names in the first column."""
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_header=any(columns))
    made.min_width = min(len(title), TITLE)
    for number, column in enumerate(columns):
        made.add_column(column, justify=justify if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def cell(found: Mapping[str, Any], key: str, style: str) -> str:
    """Values as text; "unknown" for None."""
    shown = []
    for path in key.split():
        value: Any = found
        for name in path.split("."):
            value = None if value is None else value[name]
        shown.append("unknown" if value is None else format(value, style))
    return "  ".join(shown)


def down(lines: Iterable[TableLine], *results: Figures) -> Iterator[list[str]]:
    """A line per figure, a column per result."""
    return ([line.name, *(cell(found, line.key, line.style) for found in results)] for line in lines)


def beside(lines: Iterable[TableLine], found: Figures) -> Iterator[list[str]]:
    """A line per figure, with its limit and the part of the limit that it reaches."""
    for line in lines:
        measured, limit = (cell(found, key, line.style) for key in (line.key, line.limit))
        yield [line.name, measured, limit, cell(found, line.ratio, ".3f")]


def across(lines: Iterable[TableLine], results: Iterable[Figures]) -> Iterator[list[str]]:
    """A line per result, a column per figure."""
    return ([cell(found, line.key, line.style) for line in lines] for found in results)


def throughput_table(found: Figures, workload: str) -> Table:
    """One run."""
    ours = found["outpace"]
    columns = ["", f"{ours['concurrency']} in flight"]
    return table(_title(ours, workload), columns, down([*THROUGHPUT, *_experts(ours)], found), _caption(ours))


def sweep_table(points: Sequence[Figures], workload: str) -> Table:
    """A line for each number of requests in flight."""
    ours, columns = points[-1]["outpace"], [line.name for line in LEVELS]
    return table(_title(ours, f"{workload}; output tokens/s, medians"), columns, across(LEVELS, points), _caption(ours))


def latency_table(found: Figures) -> Table:
    """Decode and first token beside their limits."""
    ours = found["outpace"]
    what = f"{ours['batch_size']} x {ours['input_len']} prompt and {ours['output_len']} new tokens"
    rows = beside([*LATENCY, *_experts(ours)], {**found, "avg_latency_ms": found["avg_latency"] * 1e3})
    return table(_title(ours, what), ["", "measured", "limit", "of the limit"], rows, _caption(ours))


def splitfuse_table(found: Figures) -> Table:
    """Both runs side by side."""
    ours = found["outpace"]
    ratios = f"P95 x {found['p95_itl_ratio']:.2f}, tokens/s x {found['throughput_ratio']:.2f}"
    rows = down(SPLITFUSE, found[SPLIT], found[WHOLE])
    return table(_title(ours, f"decodes beside long prompts: {ratios}"), ["", SPLIT, WHOLE], rows, _caption(ours))


def profile_table(found: Figures) -> Table:
    """The steps as a whole, then the longest kernels."""
    busy = "" if found["gpu_busy"] is None else f", GPU busy {found['gpu_busy']:.0%}"
    title = (
        f"a decode step of {found['batch_size']} requests: {found['step_us']:,.0f} us{busy}, "
        f"host {found['host_us_per_step']:,.0f} us"
    )
    kernels = [{**kernel, "name": kernel["name"][:90]} for kernel in found["longest"]]
    return table(title, [line.name for line in KERNELS], across(KERNELS, kernels))


def pipeline_table(found: Figures) -> Table:
    """The speed-up and the bubble, each beside its formula."""
    ours, busy, formula = found["outpace"], 1 - found["bubble"], 1 - found["bubble_formula"]
    derived = {
        "alone": min(found["one_process_seconds"]),
        "best": min(found["pipeline_seconds"]),
        "busy": busy,
        "busy_formula": formula,
        "busy_ratio": busy / formula,
        "zero": 0.0,
    }
    known = [line for line in PIPELINE if found["by_cpu_time"] or not line.name.startswith("by CPU time")]
    stages = [TableLine(f"stage {stage}, ms per micro-batch", f"stage_ms.{stage}") for stage in found["stage_ms"]]
    texts = {"stage_ms": {str(stage): took for stage, took in found["stage_ms"].items()}}
    what = f"{ours['pp']} stages, {ours['micro_batches']} micro-batches of {ours['tokens']} tokens"
    threads = "one thread" if ours["threads"] == 1 else f"{ours['threads']} threads"
    return table(
        _title(ours, what),
        ["", "measured", "ideal", "of ideal"],
        beside([*known, *stages], {**found, **derived, **texts}),
        f"{_busy(ours)}best of {ours['turns']} turns each, by turns; every process has {threads}",
    )


def served_table(points: Sequence[Figures], workload: str, *, is_sweep: bool) -> Table:
    """Load on a server: one run, or a line for each rate."""
    found = points[0]
    if is_sweep:
        lines = [line for line in RATES if line.key != "request_goodput" or found["request_goodput"] is not None]
        title = f"{found['model_id']}: {workload}; requests/s; medians and P99 in ms"
        return table(title, [line.name for line in lines], across(lines, points))
    lines, rates = [*SERVED], found["effective_throughput"]
    if found["request_goodput"] is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in found["goodput_sla_ms"].items())
        lines.append(TableLine(f"requests/s within {limits} ms", "request_goodput", ",.2f"))
    name = f"requests/s with {FASTGEN_PROMPT:.0f} prompt and {'/'.join(rates)} new tokens/s"
    lines.append(TableLine(name, " ".join(f"effective_throughput.{rate}" for rate in rates), ",.2f"))
    title = f"{found['model_id']}: {workload}, {pace_of(found)}"
    return table(title, ["", ""], down([*lines, *LATENCIES], found))


def pace_of(found: Figures) -> str:
    """When requests were sent, in words."""
    rate, most = found["request_rate"], found["max_concurrency"]
    when = "all at once" if rate == "inf" else f"{rate:g} a second ({found['arrival']})"
    return when if most is None else f"{when}, {most} at a time"


def _title(facts: Mapping[str, Any], what: str) -> str:
    return f"{facts['model']} in {facts['dtype']} on {facts['device']}: {what}"


def _caption(facts: Mapping[str, Any]) -> str:
    """Where this was measured."""
    parts = ", ".join(f"{part} {took:.2f}" for part, took in facts["startup_seconds"].items())
    return (
        f"{_busy(facts)}start-up, s: {parts}; peak memory {facts['peak_memory_bytes'] / MIB:,.0f} MiB; this device "
        f"reads {facts['read_bandwidth_gb_s']:,.1f} GB/s and computes {facts['matmul_gflop_s']:,.0f} GFLOP/s"
    )


def _busy(facts: Mapping[str, Any]) -> str:
    """A warning if other programs used so much of the machine that figures are too low."""
    others = facts["used_by_other_programs"]
    if others is None or others["cores"] < BUSY:
        return ""
    return f"busy machine: other programs used {others['cores']:.1f} of {others['of']:.0f} cores, figures are too low; "


def _experts(ours: Mapping[str, Any]) -> list[TableLine]:
    if not ours.get("experts_touched"):
        return []
    how = "counted" if ours["experts_counted"] else "expected"
    return [TableLine(f"experts of a layer in a full step, {how}", "outpace.experts_touched")]
