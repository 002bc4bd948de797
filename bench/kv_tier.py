"""Pages in host memory (offload.kv): conversations that no longer fit on the device continue with one more turn.

First all conversations have their first turn. Then all continue at once while other requests decode. Time to first
token and the rate of the others are measured with the tier, where the pages come from host memory, and without it,
where the prompts are computed again. The limit of the first token is the time that the link needs to copy the pages
that were found in host memory.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.report import DEVICE, Report, Row, row
from outpace.bench.drive import Driver, EngineTrace
from outpace.bench.subject import started
from outpace.bench.workload import Item
from outpace.kernels import limits


@dataclass(frozen=True)
class Experiment:
    """The sizes of the measurement."""

    model: str = "llama-3.1-8b"
    conversations: int = 64
    length: int = 8192
    """Tokens of the first prompt."""
    answer: int = 16
    turn: int = 64
    """New tokens of the second turn."""
    fit: int = 16
    """Conversations that fit on the device beside the other requests."""
    others: int = 32
    """Other requests, which decode."""
    steps: int = 100
    """Decode steps of the others alone."""
    block_size: int = 64
    token_bytes: int = 2 * 32 * 8 * 128 * 2
    """Bytes of the keys and values of a token: those of an 8B in bf16."""

    @property
    def blocks_each(self) -> int:
        """Blocks of a conversation at its end."""
        return -(-(self.length + self.answer + self.turn + 1) // self.block_size)

    @property
    def other_length(self) -> int:
        """Most tokens of one of the others."""
        return 64 + 20 * self.steps

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for all conversations and the other requests."""
        others = self.others * -(-self.other_length // self.block_size)
        return ((self.conversations + 1) * self.blocks_each + others) * self.block_size * self.token_bytes

    def options(self, host_bytes: int | None) -> dict[str, Any]:
        """Options of LLM; None: without the tier."""
        room = self.others * (-(-self.other_length // self.block_size) + 1)
        return {
            "max_num_seqs": self.conversations + self.others,
            "max_model_len": max(self.blocks_each * self.block_size, self.other_length) + self.block_size,
            "num_blocks": self.fit * self.blocks_each + room,
            "block_size": self.block_size,
            "offload_kv": host_bytes,
            "prefix_caching": True,
        }


TINY = Experiment("tiny", 6, 90, 4, 9, 2, 2, 8, 16, token_bytes=4 * 2 * 2 * 2 * 8)


def first_round(driver: Driver, experiment: Experiment, vocab_size: int) -> list[list[int]]:
    """Run every conversation's first turn; returns the prompts of the second turn."""
    draw = random.Random(0)
    first = [[draw.randrange(vocab_size) for _ in range(experiment.length)] for _ in range(experiment.conversations)]
    traces = [driver.add(Item(prompt, experiment.answer)) for prompt in first]
    while driver.live:
        driver.step()
    return [
        [*prompt, *trace.output.outputs[0].token_ids, *(draw.choice(prompt) for _ in range(experiment.turn))]
        for prompt, trace in zip(first, traces, strict=True)
    ]


def comes_back(driver: Driver, experiment: Experiment, second: Sequence[list[int]], vocab_size: int) -> dict[str, Any]:
    """Continue one conversation alone, then the rest at once beside requests that decode."""
    alone = driver.add(Item(second[0], 1))
    while driver.live:
        driver.step()
    draw = random.Random(2)
    for _ in range(experiment.others):
        driver.add(Item([draw.randrange(vocab_size) for _ in range(64)], experiment.other_length - 64))
    others = list(driver.live.values())
    for _ in range(10):  # their prompts
        driver.step()
    before = _rate(driver, others, lambda: False, experiment.steps)
    traces = [driver.add(Item(prompt, 1)) for prompt in second[1:]]
    beside = _rate(driver, others, lambda: all(trace.output.finished for trace in traces), 18 * experiment.steps)
    while not all(trace.output.finished for trace in traces):
        driver.step()
    times = sorted(_first_ms(trace) for trace in traces)
    driver.close()
    return {
        "alone_ms": _first_ms(alone), "mean_ms": statistics.mean(times), "median_ms": statistics.median(times),
        "last_ms": times[-1], "others_alone": before, "others_beside": beside,
        "cached_tokens": sum(trace.output.num_cached_tokens or 0 for trace in traces),
        "prompt_tokens": sum(len(prompt) for prompt in second[1:]),
    }  # fmt: skip


def _rate(driver: Driver, others: Sequence[EngineTrace], done: Callable[[], bool], most: int) -> float:
    """Tokens/s of the others until it is done, or for `most` steps."""
    count, begin = sum(len(each.times) for each in others), time.perf_counter()
    for _ in range(most):
        if done():
            break
        driver.step()
    return (sum(len(each.times) for each in others) - count) / (time.perf_counter() - begin)


def _first_ms(trace: EngineTrace) -> float:
    found = trace.output.metrics.time_to_first_token
    assert found is not None, "it has run"
    return 1e3 * found


def measure(
    experiment: Experiment, speed: limits.Speed, host_bytes: int | None, second: list[list[int]] | None = None
) -> tuple[dict[str, Any], list[list[int]]]:
    """Measure with the tier; or without it, given the prompts of the second turn, and without first turns."""
    options = {"speed": speed, "device": DEVICE.type, **experiment.options(host_bytes)}
    with started(experiment.model, **options) as subject:
        driver, engine = Driver(subject.llm.engine), subject.llm.engine
        second = second or first_round(driver, experiment, subject.vocab_size)
        loaded = engine.levels.get("load_bytes", 0)
        found = comes_back(driver, experiment, second, subject.vocab_size)
        found |= {"levels": engine.levels, "loaded_bytes": engine.levels.get("load_bytes", 0) - loaded}
        return found | {"facts": subject.facts()}, second


def rows_of(tier: dict[str, Any], off: dict[str, Any], rate: float, experiment: Experiment) -> list[Row]:
    """The figures with the tier, compared with those without it and with the time that the link needs."""
    link = 1e3 * tier["loaded_bytes"] / rate
    figures = {
        "alone_ms": ("first token, one alone", "ms", link / experiment.conversations),
        "mean_ms": (f"first token, {experiment.conversations - 1} at once, mean", "ms", None),
        "median_ms": ("the same, median", "ms", None),
        "last_ms": ("the same, last", "ms", link),
        "others_alone": (f"{experiment.others} others before", "tok/s", None),
        "others_beside": (f"{experiment.others} others while they come back", "tok/s", None),
    }
    return [row(what, tier[key], unit, limit, ("recomputed", off[key])) for key, (what, unit, limit) in figures.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure with the tier and without, and write both."""
    options = report.parser(__doc__)
    options.add_argument("--tiny", action="store_true", help="a tiny model and few conversations, on a CPU")
    sizes = ("conversations", "length", "fit", "others")
    for name in sizes:
        options.add_argument(f"--{name}", type=int, default=getattr(Experiment, name))
    given = options.parse_args(arguments)
    experiment = TINY if given.tiny else Experiment(**{name: getattr(given, name) for name in sizes})
    to, rate = Report("kv_tier", given.out), limits.link_bandwidth(DEVICE)
    to.say("with the tier")
    tier, second = measure(experiment, to.speed, experiment.host_bytes)
    to.say("without it")
    off, _ = measure(experiment, to.speed, None, second)
    what = f"{experiment.conversations} of {experiment.length} tokens, of which {experiment.fit} fit"
    to.notes = {"conversations": what, "link GB/s": rate / 1e9, "host memory GiB": experiment.host_bytes / limits.GIB}
    to.details = {"tier": tier, "off": off}
    to.add("kv_tier", rows_of(tier, off, rate, experiment))
    to.show()


if __name__ == "__main__":
    main()
