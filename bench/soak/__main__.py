"""`python -m bench.soak`: runs every row of load and faults against real servers; prints and writes a table."""

import asyncio
import datetime
import importlib.metadata
import importlib.util
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.soak import bodies, callers, chart, faults, load, streams
from bench.soak.cluster import CPUS, cluster
from bench.soak.leaks import MOST_RSS_MB, Sample, Sampler, growth, positive_control
from bench.soak.ray_rows import RAY_ROWS
from bench.soak.row import FULL, Result, Soak, by_name
from bench.soak.server import Server, is_free, serving, write_model

WARMING = by_name(load.l3, load.l4)
"""Rows of the shared server before its memory is measured: they allocate its largest buffers."""
SHARED = by_name(load.l2, faults.f8)
LEDGERS = ("N-1", "L-5")
"""Rows about the whole life of the shared server."""
OWN = by_name(
    *(streams.n2, load.l6, bodies.l8),
    *(faults.f3, faults.f6, faults.f7, faults.f7b, faults.f11, faults.f1),
    *(callers.c1, callers.c2, callers.c4),
)
"""Rows that start their own servers."""
ROWS = (*WARMING, *SHARED, *LEDGERS, *OWN)
FILES = 4096  # number of open files that the rows need


async def results(soak: Soak, wanted: frozenset[str]) -> AsyncIterator[tuple[str, Result]]:
    """Run the wanted rows; yields names and results as they come."""
    if on_cluster := [name for name in RAY_ROWS if name in wanted]:
        async with cluster(soak.model.parent) as made:
            for name in on_cluster:
                yield name, await RAY_ROWS[name](soak, made)
    if wanted & {*WARMING, *SHARED, *LEDGERS}:
        async for name, result in shared_results(soak, wanted):
            yield name, result
    for name, own in OWN.items():
        if name in wanted:
            yield name, await own(soak)


async def shared_results(soak: Soak, wanted: frozenset[str]) -> AsyncIterator[tuple[str, Result]]:
    """Run the rows that share a server, and then the rows about its whole life."""
    if not wanted & {*WARMING, *SHARED}:
        wanted |= {"L-3", "F-8"}
    async with serving(soak.model, *load.MAIN) as server:
        sampler, at = Sampler(server.pid), list[tuple[float, str]]()
        sampling = asyncio.create_task(sampler.run())
        soak.say("warming up")
        await load.warm_up(server, soak.seconds(10))
        for group in (WARMING, SHARED):
            if group is SHARED:
                await server.idle()
                before = await sampler.at_rest()
            for name in group:
                if name in wanted:
                    at.append((time.monotonic() - sampler.begin, name))
                    yield name, await group[name](soak, server)
        yield "N-1", await streams.n1(server)
        yield "L-5", await l5(server, sampler, before)
        sampling.cancel()
        soak.details["processes"] = {name: [each._asdict() for each in found] for name, found in sampler.series.items()}
        soak.details["rows at"] = at


async def l5(server: Server, sampler: Sampler, before: Mapping[str, list[Sample]]) -> Result:
    """Memory, files and threads of the shared server at the end, compared with those after its warm-up."""
    status, _ = await server.idle()
    after = await sampler.at_rest()
    grown = {name: growth(before[name], after[name]) for name in after}
    control = await positive_control()
    passed = is_free(status) and control.leaks and not any(each.leaks for each in grown.values())
    each = "; ".join(f"{name} {value}" for name, value in grown.items())
    caught = f"deliberate leak {'caught' if control.leaks else 'NOT caught'} ({control})"
    measured = f"{each}; {status['free_blocks']} of {status['num_blocks']} pages free; {caught}"
    target = f"memory +< {MOST_RSS_MB:g} MB; fds, threads as before; all pages free; a deliberate leak is caught"
    return Result(target, measured, passed, f"{time.monotonic() - sampler.begin:.0f} s")


async def run(soak: Soak, wanted: frozenset[str], console: Console) -> list[dict[str, Any]]:
    """Run the wanted rows with a progress bar; returns their table."""
    table = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[at]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("soak", total=len(wanted), at="")
        soak.say = lambda text: progress.update(task, at=text)
        async for name, result in results(soak, wanted):
            table.append({"row": name, **asdict(result), "passed": "pass" if result.passed else "FAIL"})
            mark = "[green]pass[/]" if result.passed else "[red]FAIL[/]"
            console.print(f"{mark} {name} ({result.runs}): ", result.measured, highlight=False, markup=True)
            progress.update(task, advance=1, description=f"soak, after {name}")
    return table


def main() -> int:
    """Run from the command line; returns the exit code, 1 if a row failed."""
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=FULL, help="duration; below 10 minutes there are fewer faults")
    parser.add_argument("--ray", action="store_true", help="the rows of a Ray cluster instead; needs outpace[ray]")
    known = f"{', '.join(ROWS)}; with --ray of {', '.join(RAY_ROWS)}"
    parser.add_argument("--only", help=f"rows, separated by commas, of {known}; default: all")
    options = parser.parse_args()
    rows = tuple(RAY_ROWS) if options.ray else ROWS
    wanted = frozenset(options.only.split(",") if options.only else rows)
    if not wanted <= set(rows):
        parser.error(f"--only: no such row: {', '.join(sorted(wanted - set(rows)))}")
    if options.ray and importlib.util.find_spec("ray") is None:
        parser.error("--ray: Ray Serve is not installed; pip install 'outpace[ray]'")
    if options.minutes <= 0:
        parser.error("--minutes: expected more than 0")
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < FILES:
        parser.error(f"the rows need {FILES} open files, but only {most} are allowed; see ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, FILES), most))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outpace-soak-") as folder:
        soak = Soak(Path(folder) / "model", Path(folder) / "small", options.minutes)
        weights = write_model(soak.model, 256, 4)
        write_model(soak.small, 32, 2)
        table = asyncio.run(run(soak, wanted, Console(stderr=True)))
    machine = f"cpu with {os.cpu_count()} cores, which the clients share"
    notes = {"machine": machine, "weights": weights, "minutes": round((time.monotonic() - begin) / 60, 1)}
    if options.ray:
        notes |= {"ray": importlib.metadata.version("ray"), "cluster": f"one node, num_cpus={CPUS}"}
    report.save("soak", "ray" if options.ray else "cpu", table, notes, options.out, soak.details)
    report.show("soak", table)
    if not options.ray:
        chart.draw(soak.details, options.out / f"soak_cpu_{datetime.date.today().isoformat()}.png")
    return int(any(row["passed"] == "FAIL" for row in table))


if __name__ == "__main__":
    sys.exit(main())
