"""Replicas on many nodes: what they do together, what routers, failures and starts cost, and which layout is chosen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cluster_model import NODE, PIPELINE, RATES, Model, Rates, Replica, choose, layouts
from bench.scaling import WEIGHTS

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b")


@dataclass(frozen=True)
class Cluster:
    """So many nodes of one kind of replica."""

    nodes: int
    replica: Replica
    routers: int | None = None
    """Processes that pass tokens on; None: as many as needed."""
    rates: Rates = RATES

    @property
    def replicas(self) -> int:
        """How many there are when nothing is broken."""
        return self.replica.layout.replicas(self.nodes)

    @property
    def available(self) -> float:
        """The mean part of them that works: a failure costs its node until it is repaired, and its replica a start.

        Without spare nodes; replicas over several nodes are put together anew from nodes that work.
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
        """Weights that a node reads; its replicas share what is read once."""
        return 1e9 * self.replica.gb * min(NODE, self.replica.layout.gpus)

    @property
    def core_seconds(self) -> float:
        """Of routers, for each output token: an event each, and its part of a request."""
        return self.rates.event + self.rates.request / self.replica.work.new

    @property
    def rate(self) -> float:
        """Output tokens/s, on average over failures."""
        able = self.replicas * self.available * self.replica.rate
        return able if self.routers is None else min(able, self.routers / self.core_seconds)

    @property
    def routers_needed(self) -> int:
        """Router processes, each a core, at full load."""
        return math.ceil(self.replicas * self.replica.rate * self.core_seconds)

    @property
    def dollars(self) -> float:
        """For a million output tokens."""
        return self.nodes * NODE * self.rates.price / 3600 / self.rate * 1e6

    @property
    def failures_a_day(self) -> float:
        """Expected."""
        return self.nodes * NODE / self.rates.mtbf * 86400

    @property
    def spares(self) -> int:
        """Nodes to hold ready so that those in repair are no more than these 999 times out of 1,000."""
        mean = self.nodes * NODE / self.rates.mtbf * self.rates.repair
        total = term = math.exp(-mean)
        count = 0
        while total < 0.999:
            count += 1
            term *= mean / count
            total += term
        return count

    def row(self) -> dict[str, Any]:
        """For a table."""
        each = self.replica
        return {
            "model": each.model, "weights": each.weights, "layout": str(each.layout), "nodes": self.nodes,
            "replicas": self.replicas, "requests at once": self.replicas * each.batch,
            "ms between tokens": 1e3 * each.between, "output tokens/s": self.rate, "$ a million": self.dollars,
            "binds a GPU": each.binds, "router cores": self.routers_needed, "failures a day": self.failures_a_day,
            "available": self.available, "spare nodes": self.spares, "restart s": self.restart,
            "first start s": self.first_start,
        }  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What is chosen for a model."""

    best: Replica
    every: Sequence[Replica]
    """All that fit."""
    by_stages: Mapping[int, Replica]
    """The best with so many stages."""
    first_token: float
    """Seconds, of a prompt alone."""

    def cluster(self, nodes: int) -> Cluster:
        """Of the best."""
        return Cluster(nodes, self.best)

    def within(self, between: float) -> Replica | None:
        """The cheapest with no more seconds between tokens than these."""
        quick = [each for each in self.every if each.between <= between]
        return max(quick, key=lambda each: each.rate_of_gpu, default=None)


def choices(model: Model) -> list[Choice]:
    """Of every model, in both kinds of weights."""
    found = []
    for name in MODELS:
        for weights in WEIGHTS:
            every = layouts(model, name, weights)
            best = choose(every)
            stages = {pp: [each for each in every if each.layout.pp == pp] for pp in PIPELINE}
            by_stages = {pp: choose(some) for pp, some in stages.items() if some}
            first = model.first_token(name, weights, best.layout, best.work.prompt)
            found.append(Choice(best, every, by_stages, first))
    return found
