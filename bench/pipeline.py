"""Two stages of one thread each against one process with one thread: `scripts/bench pipeline`.

The same as `outpace bench pipeline small`, with longer steps. Targets: 0.85 of the ideal speed-up, and a bubble within
10 % of the formula.
"""

from typing import Any

from bench import report
from outpace.bench.pipeline import Experiment, pipeline
from outpace.bench.plot import plot_pipeline

TARGET = 0.85


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure beside what it would ideally be."""
    by_cpu, busy, formula = found["by_cpu_time"], 1 - found["bubble"], 1 - found["bubble_formula"]
    ideal = found["ideal_speedup"]
    rows = [
        ("times as fast as one process", found["speedup"], ideal, found["of_ideal"], f"{TARGET} or more"),
        ("the same, median of the turns", found["median_speedup"], ideal, found["median_speedup"] / ideal, "-"),
        ("idle share of the stages", found["bubble"], found["bubble_formula"], _ratio(found), "0.9 to 1.1"),
        ("computing share of the stages", busy, formula, busy / formula, "0.9 to 1.1"),
        ("idle share without fill and drain", found["bubble_steady"], 0.0, "-", "-"),
    ]
    if by_cpu is not None:
        ratio = by_cpu["bubble"] / found["bubble_formula"]
        rows.append(("times as fast, by CPU time", by_cpu["speedup"], ideal, by_cpu["of_ideal"], f"{TARGET} or more"))
        rows.append(("idle share, by CPU time", by_cpu["bubble"], found["bubble_formula"], ratio, "0.9 to 1.1"))
    names = ("what", "measured", "ideal", "measured / ideal", "target")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _ratio(found: dict[str, Any]) -> float:
    return float(found["bubble"] / found["bubble_formula"])


def main() -> None:
    """Measure, and write table and picture."""
    options = report.parser(__doc__)
    options.add_argument("--model", default="small", help="a folder, or a shape of outpace bench")
    options.add_argument("--pp", type=int, default=2, help="stages")
    options.add_argument("--micro-batches", type=int, default=16)
    options.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    options.add_argument("--turns", type=int, default=5)
    asked = options.parse_args()
    experiment = Experiment(asked.pp, asked.micro_batches, asked.tokens, asked.turns)
    found = pipeline(asked.model, experiment, say=print, device="cpu")
    ours = found["outpace"]
    notes = {
        **{name: ours[name] for name in ("model", "dtype", "pp", "micro_batches", "tokens", "turns", "threads")},
        "one process s": min(found["one_process_seconds"]),
        "pipeline s": min(found["pipeline_seconds"]),
        "ms of a micro-batch, by stage": ", ".join(f"{took:.1f}" for took in found["stage_ms"].values()),
        "cores that other programs used": (ours["used_by_other_programs"] or {}).get("cores", "unknown"),
    }
    rows = rows_of(found)
    report.save("pipeline", ours["device"], rows, notes, asked.out, {"all": found})
    plot_pipeline(found, report.picture("pipeline", ours["device"], "timeline", asked.out))
    report.show("pipeline", rows)


if __name__ == "__main__":
    main()
