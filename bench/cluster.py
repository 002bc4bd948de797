"""Pipeline x tensor parallelism x replicas up to 1,000 nodes, simulated by `scripts/bench cluster`: tables, a picture.

bench/cluster_model.py says what one replica does, bench/cluster_nodes.py what many of them do with routers, failures
and starts; bench/cluster_queue.py simulates the queue in front of the replicas. docs/scaling.md lists what is assumed;
--docs writes its tables and its picture anew.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster_model import BETWEEN, MIXED, RATES, WORK, Layout, Model, Replica
from bench.cluster_nodes import Choice, choices
from bench.cluster_queue import Policy, arrivals, simulate
from bench.cluster_show import NODES, plot, tables
from bench.scaling import DENSE, DOCS, Measured

QUEUED = ("llama-3.1-70b", "bf16")
"""The model whose queues are simulated, and its weights."""
LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
WAYS: Mapping[str, tuple[int, Policy, int]] = {
    "1 replica": (1, "least loaded", 1),
    "4 replicas (1 node)": (4, "least loaded", 1),
    "40 replicas (10 nodes)": (40, "least loaded", 1),
    "40, round robin": (40, "round robin", 1),
    "40, 8 routers that know their own requests": (40, "least loaded", 8),
}
"""Replicas, how they are chosen, and by how many routers."""
BEGIN, END = "<!-- cluster: written by scripts/bench cluster --docs -->", "<!-- end of cluster -->"


def queues(model: Model, replica: Replica, slots: int = 8) -> list[dict[str, Any]]:
    """First tokens at every load, each way; so many times as many requests as all replicas hold."""
    speed, work, rows = model.speed(replica), replica.work, []
    kind = f"{replica.model}, {replica.weights}, {replica.layout}"
    for name, (replicas, policy, routers) in WAYS.items():
        for load in LOADS:
            count = slots * speed.slots * max(replicas, 10)
            requests = arrivals(load * replicas * speed.capacity(work), count, work, seed=0)
            found = simulate(speed, replicas, requests, policy, routers)
            times = {f"P{share} s": found.percentile(share / 100) for share in (50, 95)}
            rows.append({"model": kind, "way": name, "load": load, "requests": count, **times})
    return rows


def checks(model: Model) -> list[dict[str, Any]]:
    """What was measured on one GPU, beside what the same arithmetic says."""
    rows = []
    for what, key, name, weights in (("runtime", f"{DENSE}: full-load", DENSE, "bf16"), *MIXED):
        rate, work = model.run(what, key)
        said = model.replica(name, weights, Layout(), work).rate
        figures = {"prompt": work.prompt, "new": work.new, "measured tokens/s": rate}
        rows.append({"run": key, **figures, "simulated": said, "ratio": said / rate})
    return rows


def write_docs(text: str, folder: Path) -> None:
    """Put the tables into the document."""
    path = folder / "scaling.md"
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    path.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", path.read_text()))


def main() -> None:
    """Simulate everything."""
    options = report.parser(__doc__)
    options.add_argument("--results", type=Path, default=report.RESULTS, help="folder with what was measured")
    options.add_argument("--docs", action="store_true", help="write the tables and the picture of docs/scaling.md anew")
    asked = options.parse_args()
    model = Model(Measured(asked.results))
    found = choices(model)
    queued = next(each.best for each in found if (each.best.model, each.best.weights) == QUEUED)
    waits = queues(model, queued)
    rows = [each.cluster(nodes).row() for each in found for nodes in NODES if each.cluster(nodes).replicas]
    notes = {
        "workload": f"{WORK.prompt} prompt and {WORK.new} new tokens, at most {1e3 * BETWEEN:.0f} ms between tokens",
        "factor of one GPU": model.factor,
        "products that prompts reach": model.prompts_reach["bf16"],
        "products that prompts reach with experts": model.experts_reach,
        **{f"assumed: {name}": value for name, value in asdict(RATES).items()},
    }
    details = {
        "shares": {f"{each.best.model}, {each.best.weights}": each.best.shares for each in found},
        "by stages": [_stages(each) for each in found],
        "checks": checks(model),
        "queues": waits,
    }
    report.save("cluster", "h200", rows, notes, asked.out, details)
    plot(found, waits, report.picture("cluster", "h200", "simulated", asked.out))
    if asked.docs:
        write_docs(tables(found), DOCS)
        plot(found, waits, DOCS / "cluster.png")
    report.show("cluster", rows)


def _stages(choice: Choice) -> dict[str, Any]:
    kind = {"model": choice.best.model, "weights": choice.best.weights}
    return {**kind, **{str(each.layout): each.rate_of_gpu for each in choice.by_stages.values()}}


if __name__ == "__main__":
    main()
