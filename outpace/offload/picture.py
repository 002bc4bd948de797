"""Draws offload plans: where the bytes live, the predicted speed, and its limit."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outpace.offload.plan import Places, Plan

Part = tuple[str, Callable[[Places], int]]

PARTS: Mapping[str, Part] = {
    "layers on the device": ("#2171b5", lambda places: places.layers),
    "embedding, head": ("#6a51a3", lambda places: places.rest),
    "ring slots": ("#9ecae1", lambda places: places.ring),
    "keys and values": ("#238b45", lambda places: places.kv),
    "steps": ("#a1d99b", lambda places: places.workspace),
    "layers in host memory": ("#fd8d3c", lambda places: places.host + places.staging),
    "layers on disk": ("#bdbdbd", lambda places: places.disk),
}
"""Purpose of bytes -> colour, and their number."""


def draw(title: str, plans: Sequence[Plan], limits: Sequence[float], path: Path) -> None:
    """Draw one row for each plan: bytes by place on the left, tokens/s with the limit as a line on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.8 + 0.42 * len(plans)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    rows, begin = range(len(plans)), [0.0] * len(plans)
    for name, (colour, of) in PARTS.items():
        sizes = [of(plan.places) / 1e9 for plan in plans]
        if any(sizes):
            left.barh(rows, sizes, left=begin, color=colour, label=name, height=0.7)
        begin = [start + size for start, size in zip(begin, sizes, strict=True)]
    left.set_yticks(rows, [_row_name(plan) for plan in plans], fontsize="small")
    left.set_ylim(len(plans) - 0.5, -0.5)
    left.set_xlabel("GB")
    left.set_title(title, loc="left", fontsize="medium", pad=38)
    left.legend(fontsize="x-small", ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    right.barh(rows, [plan.tokens_per_second for plan in plans], color="#4292c6", height=0.7, label="predicted")
    for row, limit in enumerate(limits):
        right.plot((limit, limit), (row - 0.42, row + 0.42), color="#cb181d", linewidth=2,
                   label="limit of the rates" if not row else None)  # fmt: skip
        text = f" {plans[row].tokens_per_second:,.1f}: {plans[row].prediction.binds}"
        right.annotate(text, (limit, row), va="center", fontsize="x-small")
    right.set_xlabel("output tokens/s")
    right.set_xlim(0, 1.35 * max(limits))
    right.legend(fontsize="x-small", ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)


def _row_name(plan: Plan) -> str:
    tiers = plan.placement.tiers
    layers = " + ".join(f"{tiers.count(tier)} {tier}" for tier in ("device", "host", "disk") if tier in tiers)
    return f"{plan.precision}, {layers}, batch {plan.schedule.batch}"
