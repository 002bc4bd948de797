"""The output of `outpace plan`: a table, commands to run, and JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from outpace.cli.plan_machine import Machine
from outpace.offload.numbers import Work
from outpace.offload.place import Tier
from outpace.offload.plan import Plan

COLUMNS = ("weights", "layers", "GB", "batch", "prompts\ns", "step\nms", "tokens\n/s", "limit", "binds")
LEFT, WHOLE = ("weights", "binds"), ("layers", "GB")
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def plan_table(plans: Sequence[Plan], limits: Sequence[float], best: Plan) -> Table:
    """A row for each plan, the fastest in bold; narrow enough for 80 columns."""
    tiers = [tier for tier in TIERS if tier == "device" or any(tier in plan.placement.tiers for plan in plans)]
    table = Table(caption=f"layers and GB: {' / '.join(tiers)}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column in WHOLE)
    for plan, limit in zip(plans, limits, strict=True):
        places, prediction = plan.places, plan.prediction
        sizes = {"device": places.device, "host": places.host + places.staging, "disk": places.disk}
        table.add_row(
            plan.precision,
            "/".join(str(plan.placement.tiers.count(tier)) for tier in tiers),
            "/".join(_gigabytes(sizes[tier]) for tier in tiers),
            f"{plan.schedule.batch}",
            f"{prediction.prompt_steps * prediction.prompt.total:.2f}",
            f"{1e3 * prediction.decode.total:,.1f}",
            f"{plan.tokens_per_second:,.1f}",
            f"{limit:,.1f}",
            prediction.binds,
            style="bold" if plan is best else "",
        )
    return table


def as_data(plan: Plan, limit: float) -> dict[str, object]:
    """A plan, for JSON."""
    prediction = plan.prediction
    return {
        "precision": plan.precision,
        "kind": plan.kind,
        "tiers": list(plan.placement.tiers),
        "slots": plan.placement.slots,
        **asdict(plan.schedule),
        "bytes": {**asdict(plan.places), "device": plan.places.device},
        "tokens_per_second": plan.tokens_per_second,
        "limit_tokens_per_second": limit,
        "decode_step_seconds": prediction.decode.total,
        "prompt_step_seconds": prediction.prompt.total,
        "prompt_steps": prediction.prompt_steps,
        "seconds": prediction.seconds,
        "binds": prediction.binds,
    }


def advice(
    model: str, nvme: Path | None, found: Sequence[Plan], own: str, work: Work, page: int, there: Machine
) -> dict[str, str]:
    """Commands for the fastest plan, and for the fastest one without quantization."""
    fastest = max(found, key=lambda plan: plan.tokens_per_second)
    unchanged = [plan for plan in found if plan.precision == own]
    lines = {"fastest": _command(model, nvme, fastest, own, work, page, there)}
    if unchanged and fastest.precision != own:
        best = max(unchanged, key=lambda plan: plan.tokens_per_second)
        lines["fastest_with_weights_as_they_are"] = _command(model, nvme, best, own, work, page, there)
    return lines


def _command(model: str, nvme: Path | None, plan: Plan, own: str, work: Work, page: int, there: Machine) -> str:
    places, schedule = plan.places, plan.schedule
    words = ["outpace", "serve", model, "--dtype", own]
    if plan.precision != own:
        words += ["--quantization", plan.precision]
    if plan.placement.slots:
        own_memory = places.rest + places.layers + places.ring  # the option that matters on a CPU
        device = there.budgets.device if there.rates.link is not None else own_memory
        words += ["--offload-device-memory", _size(device)]
        words += ["--offload-host-memory", _size(there.budgets.host)]  # 0 on a CPU: it would be the same memory
        words += ["--offload-nvme", str(nvme)] if places.disk and nvme is not None else []
        pages = schedule.batch * -(-(work.prompt + work.new) // page)
        words += ["--num-gpu-blocks-override", str(pages)]
    words += ["--max-num-seqs", str(schedule.batch), "--max-num-batched-tokens", str(schedule.step_tokens)]
    return shlex.join([*words, "--max-model-len", str(work.prompt + work.new)])


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.{0 if nbytes >= 10e9 or not nbytes else 1}f}"


def _size(nbytes: int) -> str:
    """A size as a flag; rounded down, so that it fits."""
    return f"{nbytes // 10**7 / 100:g}GB" if nbytes >= 10**9 else str(nbytes)
