"""Throughput: many requests at once, or so many at a time."""

from collections.abc import Iterator, Sequence

from outpace.bench.drive import Watch, run
from outpace.bench.figures import Figures, throughput_figures
from outpace.bench.subject import Subject
from outpace.bench.workload import Item, Source, check_lengths

PER_PLACE = 4  # requests of a sweep for each one in flight


def throughput(
    subject: Subject,
    items: Sequence[Item],
    warm_up: Sequence[Item] = (),
    *,
    concurrency: int | None = None,
    watch: Watch | None = None,
) -> Figures:
    """Run the warm-up, then measure the requests; the limit of this very work and how near it is are among the figures.

    The limit is None where it is not known.
    """
    engine = subject.llm.engine
    check_lengths([*items, *warm_up], engine.max_model_len)
    if warm_up:
        subject.warm_up(warm_up, concurrency, watch)
    measured = run(engine, items, concurrency, watch)
    figures = throughput_figures(measured)
    places = min(concurrency or len(items), engine.scheduler.max_num_seqs)
    figures["outpace"] = {
        **subject.facts(),
        "concurrency": places,
        "mean_context": _mean_context(items),
        "limit": None,
        "ratio": None,
    }
    if (cost := subject.cost) is not None:
        seconds = cost.work_seconds(items, places, subject.speed)
        limit = {"seconds": seconds, "output_throughput": figures["total_output_tokens"] / seconds}
        figures["outpace"] |= {"limit": limit, "ratio": seconds / measured.seconds}
        figures["outpace"] |= {"experts_touched": cost.touched(places), "experts_counted": bool(subject.touches)}
    return figures


def sweep(
    subject: Subject,
    source: Source,
    levels: Sequence[int],
    seed: int,
    most: int | None = None,
    watch: Watch | None = None,
) -> Iterator[Figures]:
    """A closed loop for each level: that many requests in flight, each replaced when it ends.

    Four requests for each place, but no more than `most` unless there are more places.
    """
    for level in levels:
        count = min(PER_PLACE * level, max(level, most or PER_PLACE * level))
        items, warm_up = source.draw(count, seed), source.warm_up(count, seed)[: 2 * level]
        yield throughput(subject, items, warm_up, concurrency=level, watch=watch)


def _mean_context(items: Sequence[Item]) -> float:
    """Tokens that a decode sees on average."""
    seen = sum(item.output_len * (len(item.prompt) + item.output_len / 2) for item in items)
    return seen / sum(item.output_len for item in items)
