"""Throughput: many requests at once, or with a fixed number in flight."""

from collections.abc import Callable, Iterator, Sequence

from outpace.bench import figures
from outpace.bench.drive import run
from outpace.bench.figures import Figures, figures_of
from outpace.bench.subject import Subject
from outpace.bench.workload import Item, Source, check_lengths

PER_SLOT = 4  # requests of a sweep per request in flight


def throughput(
    subject: Subject, items: Sequence[Item], warm_up: Sequence[Item] = (), *, concurrency: int | None = None
) -> Figures:
    """Run the warm-up, then measure the requests. `limit` is the limit for exactly these requests; None: unknown."""
    engine = subject.llm.engine
    check_lengths([*items, *warm_up], engine.max_model_len)
    if warm_up:
        subject.warm_up(warm_up, concurrency)
    measured = run(engine, items, concurrency)
    found = figures_of(measured.traces, measured.seconds)
    found |= {
        "elapsed_time": measured.seconds,
        "num_requests": len(items),
        "total_num_tokens": found["total_input_tokens"] + found["total_output_tokens"],
        "requests_per_second": found["request_throughput"],
        "tokens_per_second": found["total_token_throughput"],
    }
    slots = min(concurrency or len(items), engine.scheduler.max_num_seqs)
    ours = {**subject.facts(), "concurrency": slots, "mean_context": _mean_context(items), "limit": None, "ratio": None}
    if (cost := subject.cost) is not None:
        seconds = cost.work_seconds(items, slots, subject.speed)
        ours["limit"] = {"seconds": seconds, "output_throughput": found["total_output_tokens"] / seconds}
        ours |= {"ratio": seconds / measured.seconds, **subject.experts_touched(slots)}
    return {**found, "outpace": ours}


def sweep(
    subject: Subject,
    source: Source,
    levels: Sequence[int],
    seed: int,
    most: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Figures]:
    """A closed loop per level: this many requests in flight, each replaced when it ends.

    Each level has four requests per slot, but at most `most` requests or one per slot, whichever is more.
    """

    def measure(level: int) -> Figures:
        count = min(PER_SLOT * level, max(level, most or PER_SLOT * level))
        items, warm_up = source.draw(count, seed), source.warm_up(count, seed)[: 2 * level]
        return throughput(subject, items, warm_up, concurrency=level)

    return figures.sweep(levels, measure, "in flight", say)


def _mean_context(items: Sequence[Item]) -> float:
    """Tokens that a decode sees on average."""
    seen = sum(item.output_len * (len(item.prompt) + item.output_len / 2) for item in items)
    return seen / sum(item.output_len for item in items)
