"""Predicts the speed of models over several GPUs, without a GPU: `scripts/bench scaling` writes tables and a picture.

step = one rank's step without collectives + collectives x published latency. The rank's step is measured if there are
results (`scripts/bench ranks`, `scripts/bench quantization`). Otherwise it is predicted in two ways from results of
whole models on one GPU: as the time of the rank's reads plus a fixed time for each layer, and by the share of the limit
(the floor) that one GPU reached. docs/scaling.md explains it; --docs rewrites its tables and its picture.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import report
from outpace.bench.plot import canvas
from outpace.bench.shapes import SHAPES, rank_shape
from outpace.kernels.limits import GIB, Speed

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b")
RANKS = (1, 2, 4, 8)
BATCHES = (1, 8, 32, 64)
CONTEXT = 1056  # 1,024 prompt tokens and half of 64 new ones, as measured
WEIGHTS: Mapping[str, str] = {"bf16": "none", "fp8": "fp8+fp8"}
"""Kinds of weights -> schemes they were measured with: fp8 also has keys and values of 8 bits."""
MEMORY = 139 * GIB * 0.9  # memory of an H200 times the default of `gpu_memory_utilization`
RESERVED = 6 * GIB  # for steps and graphs
DENSE, MOE = "llama-3.1-8b", "qwen3-30b-a3b"  # models that were measured on one GPU
SMALL = "qwen3-0.6b"
DRAWS = 400  # random draws of experts
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- tables: written by scripts/bench scaling --docs -->", "<!-- end of tables -->"

KIB = 1 << 10
LATENCIES: Mapping[str, Mapping[int, Mapping[int, float]]] = {
    "direct": {
        2: {8: 6.0, 16: 6.4, 72: 7.0, 512: 7.0, 1024: 12.0},
        4: {8: 6.0, 16: 6.4, 32: 7.2, 64: 8.2, 128: 8.8, 512: 10.0, 1024: 15.0},
        8: {8: 6.0, 16: 6.4, 32: 7.2, 64: 8.2, 128: 8.8, 256: 10.6, 512: 12.0, 1024: 14.0},
    },
    "nccl": {
        2: {8: 17.2, 16: 17.8, 512: 17.8, 1024: 19.0},
        4: {8: 17.2, 16: 17.8, 512: 17.8, 1024: 19.0},
        8: {8: 17.2, 16: 17.8, 32: 19.6, 64: 19.9, 128: 20.1, 256: 20.3, 512: 20.9, 1024: 27.0},
    },
}
"""Microseconds of an all-reduce by ranks and KiB, in CUDA graphs on one node with NVLink. Sources: docs/scaling.md.

Small sizes that are not published for 2 and 4 ranks are those of 8."""


@dataclass(frozen=True)
class Share:
    """Weights and cache of one rank."""

    layers: int
    hidden: int
    read_bytes: float
    """Bytes of weights that every step reads: all except experts and the embedding."""
    held_bytes: float
    """Bytes of all weights."""
    expert_bytes: float
    """Bytes of one expert of one layer; 0: there are no experts."""
    kv_bytes: float
    """Bytes of keys and values of one token in all layers."""
    token_flops: float

    @classmethod
    def of(cls, shape: Mapping[str, Any], weights: str, routed: int = 0) -> "Share":
        """From the shape of a rank. routed: number of experts of its router; 0: those of the rank."""
        width, pages = (2, 2.0) if weights == "bf16" else (1, 1 + 4 / shape["head_dim"])  # a scale for each key
        hidden, layers, vocab = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
        heads, keys = (shape[key] * shape["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        attention = hidden * (heads + 2 * keys) + heads * hidden
        experts = shape.get("num_experts", 0)
        expert = 3 * hidden * shape["moe_intermediate_size"] if experts else 0
        router = hidden * (routed or experts)
        mlp = 0 if experts else 3 * hidden * shape["intermediate_size"]
        head_norms = 2 * shape["head_dim"] if shape["model_type"].startswith("qwen3") else 0
        plain = layers * (2 * hidden + head_norms + router) + hidden  # norms and routers stay in 16 bits
        read = width * (layers * (attention + mlp) + vocab * hidden) + 2 * plain
        active = attention + mlp + expert * shape.get("num_experts_per_tok", 0) + router
        return cls(
            layers=layers,
            hidden=hidden,
            read_bytes=read,
            held_bytes=read + 2 * vocab * hidden + layers * experts * width * expert,
            expert_bytes=width * expert,
            kv_bytes=layers * 2 * keys * pages,
            token_flops=2 * (layers * active + vocab * hidden),
        )

    def floor(self, batch: int, experts: float, speed: Speed) -> float:
        """The least seconds of a step that reads this many experts of each layer."""
        reads = self.read_bytes + self.layers * experts * self.expert_bytes
        return max(batch * self.token_flops / speed.flops, reads / speed.bandwidth) + (
            batch * CONTEXT * self.kv_bytes / speed.bandwidth
        )

    @property
    def room(self) -> int:
        """Tokens whose keys and values fit beside the weights; 0 or less: the weights do not fit."""
        return int((MEMORY - RESERVED - self.held_bytes) / self.kv_bytes)


@cache
def experts_read(total: int, top_k: int, ranks: int, batch: int) -> tuple[float, float]:
    """Experts of a layer that a rank reads: the mean of all ranks, and the mean of the busiest one, which all wait for.

    The mean of many random draws; all experts are equally likely.
    """
    if not total:
        return 0.0, 0.0
    draw = np.random.default_rng(0).random((DRAWS, batch, total), dtype=np.float32)
    chosen = np.zeros((DRAWS, total), dtype=bool)
    places = np.argpartition(draw, top_k - 1, axis=2)[:, :, :top_k].reshape(DRAWS, -1)
    np.put_along_axis(chosen, places, True, axis=1)
    each = chosen.reshape(DRAWS, ranks, total // ranks).sum(axis=2)
    return float(each.mean()), float(each.max(axis=1).mean())


class Step(NamedTuple):
    """A measured decode step and its floor, in seconds."""

    took: float
    floor: float


@cache
def newest(folder: Path, what: str, key: str) -> tuple[dict[str, Any], Any] | None:
    """The newest H200 results of a kind with this part: the whole file, and the part."""
    for path in sorted(folder.glob(f"{what}_h200_*.json"), reverse=True):
        content = json.loads(path.read_text())
        found = content.get("details", {})
        if key in found and found[key] and "error" not in found[key]:
            return content, found[key]
    return None


@dataclass(frozen=True)
class Measured:
    """The measured results that predictions are based on."""

    folder: Path

    def needed(self, what: str, key: str) -> tuple[dict[str, Any], Any]:
        """The newest results with this part; exits without them."""
        if (found := newest(self.folder, what, key)) is None:
            raise SystemExit(f"{self.folder}: no results {what}_h200_*.json have {key!r}; measure them first")
        return found

    @cached_property
    def speed(self) -> Speed:
        """The speed of the device in the run that measured the dense model."""
        content, _ = self.needed("quantization", f"{DENSE}, none: decode")
        return Speed(content["read bandwidth TB/s"] * 1e12, content["bf16 TFLOP/s"] * 1e12)

    @cached_property
    def reading(self) -> float:
        """Seconds of a step for each second of its floor: the slope of a line through two models of one run."""
        content, _ = self.needed("runtime", f"{SMALL}: latency")
        steps = {model: _step(content["details"][f"{model}: latency"]) for model in (DENSE, SMALL)}
        layers = {model: SHAPES[model]["num_hidden_layers"] for model in steps}
        (x1, y1), (x0, y0) = ((step.floor / layers[model], step.took / layers[model]) for model, step in steps.items())
        return (y1 - y0) / (x1 - x0)

    def whole(self, model: str, weights: str) -> dict[int, Step]:
        """Steps of a whole model on one GPU, by batch."""
        what, way = ("quantization", WEIGHTS[weights]) if model == DENSE else ("moe", "triton")
        _, found = self.needed(what, f"{model}, {way}: decode")
        return {int(batch): _step(each) for batch, each in found.items()}

    def fixed(self, moe: bool, weights: str, batch: int) -> float:
        """Seconds of a layer besides its reads. Batches above the largest measured one count as the largest."""
        if moe and weights != "bf16":  # not measured: add the difference of the dense model
            extra = self.fixed(False, weights, batch) - self.fixed(False, "bf16", batch)
            return self.fixed(True, "bf16", batch) + extra
        model = MOE if moe else DENSE
        steps = self.whole(model, weights)
        step = steps[max(size for size in steps if size <= batch)]
        return (step.took - self.reading * step.floor) / SHAPES[model]["num_hidden_layers"]

    def share(self, moe: bool, weights: str, batch: int) -> float:
        """The share of the limit that was reached on one GPU."""
        steps = self.whole(MOE if moe else DENSE, "bf16" if moe else weights)
        step = steps[max(size for size in steps if size <= batch)]
        return step.floor / step.took

    def rank(self, model: str, ranks: int, weights: str, batch: int) -> float | None:
        """Seconds of a step of one rank alone, if it was measured."""
        if ranks == 1 and model == DENSE:
            return self.whole(model, weights)[batch].took
        name = f"{model}, one of {ranks} ranks, {WEIGHTS[weights]}: steps"
        if (found := newest(self.folder, "ranks_steps", name)) is None or str(batch) not in found[1]["batches"]:
            return None
        return float(found[1]["batches"][str(batch)]["step_ms"]) / 1e3


def _step(found: Mapping[str, Any]) -> Step:
    limit = found["outpace"]["limit"]["decode_tokens_per_second"]
    return Step(1 / found["decode_tokens_per_second"], 1 / limit)


def all_reduce(kind: str, ranks: int, size: int) -> float:
    """Seconds of one all-reduce of `size` bytes."""
    points = LATENCIES[kind][ranks]
    return float(np.interp(size / KIB, [*points], [*points.values()])) * 1e-6


def collectives(share: Share, ranks: int, batch: int, kind: str) -> float:
    """Seconds of all collectives of a step: two in each layer, one after the embedding, a small one for sampling."""
    if ranks == 1:
        return 0.0
    large = all_reduce(kind, ranks, 2 * batch * share.hidden)
    return (2 * share.layers + 1) * large + all_reduce(kind, ranks, 8 * KIB)


class Prediction(NamedTuple):
    """One model over several ranks at one batch size; times in milliseconds."""

    model: str
    weights: str
    ranks: int
    batch: int
    gb: float
    """GB of weights on each rank."""
    room: int
    floor: float
    rank: float
    """A step of one rank without collectives."""
    by_share: float
    """The same if it reaches the same share of the floor as one GPU; equal to `rank` if that was measured."""
    source: str
    direct: float
    """Collectives that write directly into the memory of other ranks."""
    nccl: float
    """Collectives by NCCL."""

    @property
    def step(self) -> float:
        """The whole step."""
        return self.rank + self.direct

    @property
    def cell(self) -> str:
        """Milliseconds and tokens/s of all requests together, as ranges between the two predictions."""
        steps = sorted((self.step, self.by_share + self.direct))
        rates = [1e3 * self.batch / each for each in reversed(steps)]
        if self.source == "measured":
            return f"{steps[0]:.2f} ms*, {rates[0]:,.0f}/s"
        return f"{steps[0]:.2f}–{steps[1]:.2f} ms, {rates[0]:,.0f}–{rates[1]:,.0f}/s"

    def row(self) -> dict[str, Any]:
        rate = 1e3 * self.batch / self.step
        return {**self._asdict(), "step": self.step, "tokens/s": rate, "tokens/s a GPU": rate / self.ranks}


@cache
def share_of(model: str, weights: str, ranks: int) -> Share:
    """The share of one rank of a model."""
    return Share.of(rank_shape(model, ranks), weights, SHAPES[model].get("num_experts", 0))


def predict(measured: Measured, model: str, weights: str, ranks: int, batch: int) -> Prediction:
    """Predict the step of one model."""
    experts, top_k = (SHAPES[model].get(key, 0) for key in ("num_experts", "num_experts_per_tok"))
    share, speed = share_of(model, weights, ranks), measured.speed
    mean, most = experts_read(experts, top_k, ranks, batch)
    floor = share.floor(batch, most, speed)
    took, source = measured.rank(model, ranks, weights, batch), "measured"
    if took is None:
        fixed, source = measured.fixed(experts > 0, weights, batch), "predicted"
        took = measured.reading * floor + share.layers * fixed
        by_share = floor / measured.share(experts > 0, weights, batch)
    else:  # the measured rank read the mean number of experts, not that of the busiest rank
        took += share.layers * (most - mean) * share.expert_bytes / speed.bandwidth
        by_share = took
    direct, nccl = (collectives(share, ranks, batch, kind) for kind in ("direct", "nccl"))
    return Prediction(
        *(model, weights, ranks, batch, share.held_bytes / 1e9, share.room, 1e3 * floor, 1e3 * took, 1e3 * by_share),
        *(source, 1e3 * direct, 1e3 * nccl),
    )


def predictions(measured: Measured) -> list[Prediction]:
    """Predictions for every model, kind of weights, number of ranks and batch."""
    return [predict(measured, *each) for each in product(MODELS, WEIGHTS, RANKS, BATCHES)]


def tables(found: Sequence[Prediction]) -> str:
    """A table for each model and kind of weights, in Markdown."""
    lines = []
    heads = " | ".join(f"batch {batch}" for batch in BATCHES)
    for model, weights in product(MODELS, WEIGHTS):
        lines += [f"**{model}, {weights}**", "", f"| ranks | GB a rank | {heads} | batch 1, NCCL |"]
        lines.append("|" + "---|" * (len(BATCHES) + 3))
        for ranks in RANKS:
            lines.append(_line([each for each in found if each[:3] == (model, weights, ranks)]))
        lines.append("")
    return "\n".join(lines)


def _line(some: Sequence[Prediction]) -> str:
    first = some[0]
    begin = f"| {first.ranks} | {first.gb:.0f} | "
    if first.room <= 0:
        return f"{begin}does not fit |" + " |" * len(BATCHES)
    slower = f"up to {max(first.rank, first.by_share) + first.nccl:.2f} ms" if first.ranks > 1 else ""
    return f"{begin}{' | '.join(each.cell for each in some)} | {slower} |"


def plot(found: Sequence[Prediction], path: Path) -> None:
    """Draw a step of one request above, tokens/s of 64 requests below, and a column for each model."""
    figure = canvas(13, 7.5)
    axes: Any = figure.subplots(2, len(MODELS))
    for (column, model), (weights, colour) in product(enumerate(MODELS), (("bf16", "#2171b5"), ("fp8", "#cb181d"))):
        fitting = [each for each in found if each[:2] == (model, weights) and each.room > 0]
        for axis, batch in zip(axes[:, column], (1, 64), strict=True):
            _draw(axis, [each for each in fitting if each.batch == batch], weights, colour)
            axis.set(xscale="log", xticks=RANKS, xticklabels=RANKS, xlabel="GPUs", xlim=(0.9, 9), ylim=(0, None))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0, column].set_title(model, loc="left")
    axes[0, 0].set_ylabel("ms a step, one request")
    axes[1, 0].set_ylabel("tokens/s, 64 requests")
    axes[0, 0].legend(fontsize="small")
    figure.suptitle(
        "Predicted, never measured on several GPUs: decode over H200s with NVLink, contexts of 1,024 tokens"
    )
    figure.savefig(path, dpi=110)


def _draw(axis: Any, some: Sequence[Prediction], label: str, colour: str) -> None:
    """Draw both predictions, the step with NCCL, and for one request the floor."""
    ranks, single = [each.ranks for each in some], some[0].batch == 1

    def values(times: Sequence[float]) -> list[float]:
        return [took if single else 1e3 * each.batch / took for each, took in zip(some, times, strict=True)]

    steps = values([each.step for each in some])
    axis.plot(ranks, steps, "o-", color=colour, label=label)
    by_share = values([each.by_share + each.direct for each in some])
    axis.fill_between(ranks, steps, by_share, color=colour, alpha=0.12)
    axis.plot(ranks, values([each.rank + each.nccl for each in some]), ":", color=colour, label=f"{label}, NCCL")
    if single:  # in tokens/s of 64 requests it would be far above everything else
        axis.plot(ranks, [each.floor for each in some], "--", color=colour, alpha=0.5, label=f"{label}, floor")


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict everything."""
    options = report.parser(__doc__)
    options.add_argument("--docs", action="store_true", help="rewrite the tables and the picture of docs/scaling.md")
    asked = options.parse_args(arguments)
    measured = Measured(report.RESULTS)
    found = predictions(measured)
    notes: dict[str, Any] = {
        "read bandwidth TB/s": measured.speed.bandwidth / 1e12,
        "seconds for each second of reading": measured.reading,
    }
    for moe, weights in product((False, True), WEIGHTS):
        fixed = ", ".join(f"{1e6 * measured.fixed(moe, weights, batch):.1f} at {batch}" for batch in BATCHES)
        notes[f"fixed us a layer, {'experts' if moe else 'dense'}, {weights}"] = fixed
    rows = [each.row() for each in found]
    report.save("scaling", "h200", rows, notes, asked.out)
    plot(found, report.picture("scaling", "h200", "predicted", asked.out))
    if asked.docs:
        report.write_into(DOCS / "scaling.md", BEGIN, END, tables(found))
        plot(found, DOCS / "scaling.png")
    report.show("scaling", rows)


if __name__ == "__main__":
    main()
