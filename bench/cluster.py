"""Simulates pipeline x tensor parallelism x replicas up to 1,000 nodes: `scripts/bench cluster`.

bench/cluster_model.py predicts one replica. This file adds many replicas, routers, failures and starts, and chooses the
layouts. docs/scaling.md lists the assumptions; --docs rewrites its tables and its picture.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster_model import BETWEEN, NODE, PIPELINE, RATES, WORK, Model, Rates, Replica, choose, layouts
from bench.scaling import DOCS, WEIGHTS, Measured
from outpace.bench.plot import canvas

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b")
NODES = (1, 10, 100, 1000)
LIMITS = (0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4)  # seconds between tokens
BEGIN, END = "<!-- cluster: written by scripts/bench cluster --docs -->", "<!-- end of cluster -->"


@dataclass(frozen=True)
class Cluster:
    """Nodes with one kind of replica."""

    nodes: int
    replica: Replica
    rates: Rates = RATES

    @property
    def replicas(self) -> int:
        """Number of replicas without failures."""
        return self.replica.layout.replicas(self.nodes)

    @property
    def available(self) -> float:
        """The mean fraction of replicas that work: a failure costs its node until the repair, and its replica a start.

        Without spare nodes; replicas over several nodes are formed again from nodes that work.
        """
        gpus = max(NODE, self.replica.layout.gpus)
        return max(0.0, 1 - (NODE * self.rates.repair + gpus * self.restart) / self.rates.mtbf)

    @property
    def restart(self) -> float:
        """Seconds from a failure until another node has taken over, with the weights on its own disk."""
        return self.rates.detect + self.rates.start + self._node_bytes / self.rates.disk

    @property
    def first_start(self) -> float:
        """Seconds until all nodes run, when all read the weights from the store at once."""
        return self.rates.start + self.nodes * self._node_bytes / self.rates.store

    @property
    def _node_bytes(self) -> float:
        """Bytes of weights that a node reads once for all its replicas."""
        return 1e9 * self.replica.gb * min(NODE, self.replica.layout.gpus)

    @property
    def rate(self) -> float:
        """Mean output tokens/s, with failures."""
        return self.replicas * self.available * self.replica.rate

    @property
    def routers_needed(self) -> int:
        """Router processes (one core each) at full load; each output token costs an event and its part of a request."""
        core_seconds = self.rates.event + self.rates.request / self.replica.work.new
        return math.ceil(self.replicas * self.replica.rate * core_seconds)

    @property
    def dollars(self) -> float:
        """Dollars for a million output tokens."""
        return self.nodes * NODE * self.rates.price / 3600 / self.rate * 1e6

    @property
    def failures_a_day(self) -> float:
        return self.nodes * NODE / self.rates.mtbf * 86400

    @property
    def spares(self) -> int:
        """Spare nodes that are enough for all nodes in repair with a probability of 99.9 %."""
        mean = self.nodes * NODE / self.rates.mtbf * self.rates.repair
        total = term = math.exp(-mean)
        count = 0
        while total < 0.999:
            count += 1
            term *= mean / count
            total += term
        return count

    def row(self) -> dict[str, Any]:
        each = self.replica
        return {
            "model": each.model, "weights": each.weights, "layout": str(each.layout), "nodes": self.nodes,
            "replicas": self.replicas, "requests at once": self.replicas * each.batch,
            "ms between tokens": 1e3 * each.between, "output tokens/s": self.rate, "$ a million": self.dollars,
            "available": self.available, "restart s": self.restart,
        }  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The layout chosen for a model, and the others."""

    best: Replica
    every: Sequence[Replica]
    """All layouts that fit."""
    by_stages: Mapping[int, Replica]
    """Number of stages -> the best layout."""
    first_token: float
    """Seconds to the first token of a prompt alone."""

    def within(self, between: float) -> Replica | None:
        """The cheapest layout with at most this many seconds between tokens."""
        quick = [each for each in self.every if each.between <= between]
        return max(quick, key=lambda each: each.rate_of_gpu, default=None)


def choices(model: Model) -> list[Choice]:
    """The choice for every model and kind of weights."""
    found = []
    for name, weights in product(MODELS, WEIGHTS):
        every = layouts(model, name, weights)
        best = choose(every)
        stages = {pp: [each for each in every if each.layout.pp == pp] for pp in PIPELINE}
        first = model.first_token(name, weights, best.layout, best.work.prompt)
        found.append(Choice(best, every, {pp: choose(some) for pp, some in stages.items() if some}, first))
    return found


def tables(found: Sequence[Choice]) -> str:
    """The tables of the document, in Markdown."""
    some = (_rates_table(found), _nodes_table(found), _stages_table(found))
    return "\n\n".join("\n".join(lines) for lines in some) + "\n"


def _rates_table(found: Sequence[Choice]) -> list[str]:
    nodes = [f"{nodes:,} node{'s' * (nodes > 1)}" for nodes in NODES]
    heads = ("model", "layout", "requests", "first token, between, ms", *nodes)
    rows = []
    for each in found:
        best, cheapest = each.best, max(each.every, key=lambda replica: replica.rate_of_gpu)
        shares = sorted(best.shares.items(), key=lambda item: -item[1])[:3]
        rows.append((
            f"{best.model}, {best.weights}", best.layout, best.batch,
            f"{1e3 * each.first_token:.0f}, {1e3 * best.between:.0f}",
            *(_rate(Cluster(nodes, best).rate) for nodes in NODES), f"{Cluster(1000, best).dollars:.2f}",
            ", ".join(f"{name} {share:.0%}" for name, share in shares), f"{cheapest.layout}, {cheapest.dollars:.2f}",
        ))  # fmt: skip
    return report.markdown((*heads, "$ a million", "a GPU's time", "without the limit: layout, $"), rows)


def _nodes_table(found: Sequence[Choice]) -> list[str]:
    some = [each for each in found if each.best.weights == "bf16"]
    names = ", ".join(each.best.model.rpartition("-")[0 if "qwen" in each.best.model else 2] for each in some)
    rows = []
    for nodes in NODES:
        each = [Cluster(nodes, choice.best) for choice in some]
        cores = ", ".join(f"{one.routers_needed:,}" for one in each)
        starts = ", ".join(f"{one.first_start:,.0f}" for one in each)
        rows.append((f"{nodes:,}", f"{each[0].failures_a_day:.3f}", each[0].spares, cores, starts))
    heads = ("nodes", "failures a day", "spare nodes", f"router cores: {names}", f"first start of all, s: {names}")
    return report.markdown(heads, rows)


def _stages_table(found: Sequence[Choice]) -> list[str]:
    rows = [
        (f"{each.best.model}, {each.best.weights}", *(_stage(each.by_stages.get(pp)) for pp in PIPELINE))
        for each in found
    ]
    return report.markdown(("model", *(f"PP {pp}" for pp in PIPELINE)), rows)


def _stage(replica: Replica | None) -> str:
    if replica is None or replica.between > BETWEEN:
        return "-"
    waits = f" ({replica.shares['waiting for stages']:.1%})" if replica.layout.pp > 1 else ""
    return f"TP {replica.layout.tp}: {replica.rate_of_gpu:,.0f}{waits}"


def _rate(rate: float) -> str:
    return f"{rate / 1e6:,.2f} M" if rate >= 1e6 else f"{rate / 1e3:,.1f} k"


def plot(found: Sequence[Choice], path: Path) -> None:
    """Draw the shares of a GPU's time, and dollars by the allowed time between tokens."""
    figure = canvas(14, 5)
    shares, limits = figure.subplots(1, 2)
    names = [f"{each.best.model}, {each.best.weights}\n{each.best.layout}" for each in found]
    left = [0.0] * len(found)
    for kind in found[0].best.shares:
        parts = [each.best.shares[kind] for each in found]
        shares.barh(names, parts, left=left, label=kind)
        left = [before + part for before, part in zip(left, parts, strict=True)]
    shares.invert_yaxis()
    shares.set(xlabel="share of the time of a GPU", title="What binds: where the time goes", xlim=(0, 1))
    for each in [each for each in found if each.best.weights == "bf16"]:
        points = {limit: each.within(limit) for limit in LIMITS}
        costs = {1e3 * limit: replica.dollars for limit, replica in points.items() if replica is not None}
        limits.plot([*costs], [*costs.values()], "o-", label=f"{each.best.model}, bf16")
    limits.set(xscale="log", yscale="log", xlabel="ms between tokens that are allowed")
    limits.set_title("$ for a million output tokens, by the limit between tokens")
    limits.set_xticks([1e3 * limit for limit in LIMITS], [f"{1e3 * limit:.0f}" for limit in LIMITS])
    limits.minorticks_off()
    for axes in (shares, limits):
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
    figure.suptitle("Simulated: pipeline x tensor parallelism x replicas on nodes of 8 H200, 1,000 + 1,000 tokens")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate everything."""
    options = report.parser(__doc__)
    options.add_argument("--docs", action="store_true", help="rewrite the tables and the picture of docs/scaling.md")
    asked = options.parse_args(arguments)
    model = Model(Measured(report.RESULTS))
    found = choices(model)
    clusters = [Cluster(nodes, each.best) for each in found for nodes in NODES]
    rows = [each.row() for each in clusters if each.replicas]
    notes = {
        "workload": f"{WORK.prompt} prompt and {WORK.new} new tokens, at most {1e3 * BETWEEN:.0f} ms between tokens",
        "factor of one GPU": model.factor,
        "products that prompts reach": model.prompts_reach["bf16"],
        "products that prompts reach with experts": model.experts_reach,
        **{f"assumed: {name}": value for name, value in asdict(RATES).items()},
    }
    shares = {f"{each.best.model}, {each.best.weights}": each.best.shares for each in found}
    report.save("cluster", "h200", rows, notes, asked.out, {"shares": shares, "checks": model.checks()})
    plot(found, report.picture("cluster", "h200", "simulated", asked.out))
    if asked.docs:
        report.write_into(DOCS / "scaling.md", BEGIN, END, tables(found))
        plot(found, DOCS / "cluster.png")
    report.show("cluster", rows)


if __name__ == "__main__":
    main()
