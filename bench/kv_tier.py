"""Pages in host memory (offload.kv): conversations that no longer fit the device come back with one more turn.

All conversations have their first turn. Then all come back at once, beside others that decode: time to first token and
the rate of the others are measured with the tier, where the pages come from host memory, and without it, where the
prompts are computed again. The limit of the first token is the time in which the link can copy the pages that were
found in host memory.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import report
from outpace.bench.drive import Driver, Trace
from outpace.bench.subject import started
from outpace.bench.workload import Item
from outpace.kernels import limits
from outpace.offload.store_memory import aligned
from outpace.types import RequestOutput

CONSOLE = Console(width=150, highlight=False, markup=False)
BLOCK = 64
GIB = 1 << 30


@dataclass(frozen=True)
class Experiment:
    """How many come back, and beside whom."""

    conversations: int = 64
    length: int = 8192
    """Tokens of the first prompt."""
    answer: int = 16
    turn: int = 64
    """Tokens that are new when it comes back."""
    fit: int = 16
    """Conversations that fit the device beside the others."""
    others: int = 32
    steps: int = 100
    """Of the others alone."""
    block_size: int = BLOCK

    @property
    def blocks_each(self) -> int:
        """Blocks of a conversation at its end."""
        return -(-(self.length + self.answer + self.turn + 1) // self.block_size)

    def options(self, *, host_bytes: int | None) -> dict[str, Any]:
        """Of LLM, with the tier or without."""
        room = self.others * (-(-self.other_length // self.block_size) + 1)
        return {
            "max_num_seqs": self.conversations + self.others,
            "max_model_len": max(self.blocks_each * self.block_size, self.other_length) + self.block_size,
            "num_blocks": self.fit * self.blocks_each + room,
            "block_size": self.block_size,
            "offload_kv": host_bytes,
            "prefix_caching": True,
        }

    @property
    def other_length(self) -> int:
        """Most tokens of one of the others."""
        return 64 + 20 * self.steps


def prompts(experiment: Experiment, vocab_size: int) -> list[list[int]]:
    """First turns."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(experiment.length)] for _ in range(experiment.conversations)]


def first_round(driver: Driver, experiment: Experiment, first: Sequence[list[int]]) -> list[list[int]]:
    """Every conversation's first turn; what each says when it comes back."""
    traces, draw = [driver.add(Item(prompt, experiment.answer)) for prompt in first], random.Random(1)
    while driver.live:
        driver.step()
    return [
        [*prompt, *trace.output.outputs[0].token_ids, *(draw.choice(prompt) for _ in range(experiment.turn))]
        for prompt, trace in zip(first, traces, strict=True)
    ]


def comes_back(driver: Driver, experiment: Experiment, second: Sequence[list[int]], vocab_size: int) -> dict[str, Any]:
    """One conversation that comes back alone, then all others at once beside requests that decode."""
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
    times = sorted(_first(trace.output) for trace in traces)
    driver.close()
    return {
        "alone_ms": 1e3 * _first(alone.output),
        "mean_ms": 1e3 * statistics.mean(times),
        "median_ms": 1e3 * statistics.median(times),
        "last_ms": 1e3 * times[-1],
        "others_alone": before,
        "others_beside": beside,
        "cached_tokens": sum(trace.output.num_cached_tokens or 0 for trace in traces),
        "prompt_tokens": sum(len(prompt) for prompt in second[1:]),
    }


def _rate(driver: Driver, others: Sequence[Trace], done: Any, most: int) -> float:
    """Tokens per second of the others, until it is done or for so many steps."""
    count, begin = sum(len(each.times) for each in others), time.perf_counter()
    for _ in range(most):
        if done():
            break
        driver.step()
    return (sum(len(each.times) for each in others) - count) / (time.perf_counter() - begin)


def _first(output: RequestOutput) -> float:
    found = output.metrics.time_to_first_token
    assert found is not None, "it has run"
    return found


def measure(
    model: str | nn.Module,
    experiment: Experiment,
    host_bytes: int | None,
    second: list[list[int]] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], list[list[int]]]:
    """With the tier or, given what they say when they come back, without it and without their first turns."""
    begin = time.perf_counter()
    with started(model, **experiment.options(host_bytes=host_bytes), **options) as subject:
        ready, driver = time.perf_counter() - begin, Driver(subject.llm.engine)
        second = second or first_round(driver, experiment, prompts(experiment, subject.vocab_size))
        loaded = subject.llm.engine.levels.get("load_bytes", 0)
        found = comes_back(driver, experiment, second, subject.vocab_size)
        levels = subject.llm.engine.levels
        found |= {"levels": levels, "loaded_bytes": levels.get("load_bytes", 0) - loaded, "start_seconds": ready}
        found |= {"seconds": time.perf_counter() - begin, "facts": subject.facts()}
        return found, second


def link_rate(device: torch.device) -> float | None:
    """Bytes per second from page-locked memory to the device, in one long copy."""
    if device.type != "cuda":
        return None
    source, target = aligned(GIB, pinned=True), torch.empty(GIB, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return GIB / min(times)


def rows(tier: dict[str, Any], off: dict[str, Any], rate: float | None, experiment: Experiment) -> list[dict[str, Any]]:
    """The figures side by side."""
    each = tier["loaded_bytes"] / experiment.conversations
    limits_ms = {
        "alone_ms": None if rate is None else 1e3 * each / rate,
        "last_ms": None if rate is None else 1e3 * tier["loaded_bytes"] / rate,
    }
    names = {
        "alone_ms": "first token, one alone, ms",
        "mean_ms": f"first token, {experiment.conversations - 1} at once, mean, ms",
        "median_ms": "the same, median, ms",
        "last_ms": "the same, last, ms",
    }
    found = [
        {"what": text, "tier": tier[key], "recomputed": off[key], "times": off[key] / tier[key],
         "link limit": limits_ms.get(key) or "-"}
        for key, text in names.items()
    ]  # fmt: skip
    for key, text in (("others_alone", "before"), ("others_beside", "while they come back")):
        found.append(
            {"what": f"{experiment.others} others {text}, tok/s", "tier": tier[key], "recomputed": off[key],
             "times": tier[key] / off[key], "link limit": "-"}
        )  # fmt: skip
    parts = [each["others_beside"] / each["others_alone"] for each in (tier, off)]
    return [
        *found,
        {"what": "others: part of their rate", "tier": parts[0], "recomputed": parts[1], "times": parts[0] / parts[1],
         "link limit": "-"},
    ]  # fmt: skip


def tiny() -> nn.Module:
    """A model that a CPU can run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=97, max_position_embeddings=4096,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


TINY = Experiment(conversations=6, length=90, answer=4, turn=9, fit=2, others=2, steps=8, block_size=16)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure with the tier and without, and write both."""
    options = report.parser(__doc__)
    options.add_argument("--model", default="llama-3.1-8b", help="a shape, or a model")
    options.add_argument("--tiny", action="store_true", help="a tiny model and few conversations, on a CPU")
    options.add_argument("--host-memory", type=int, help="bytes of host memory for pages; for an 8B it is known")
    for name in ("conversations", "length", "fit", "others"):
        options.add_argument(f"--{name}", type=int, default=getattr(Experiment(), name))
    given = options.parse_args(arguments)
    experiment = TINY if given.tiny else _asked(given)
    device = torch.device("cpu" if given.tiny or not torch.cuda.is_available() else "cuda")
    rate = link_rate(device)
    speed = limits.Speed(1.0, 1.0) if given.tiny else None
    more: dict[str, Any] = {"device": str(device), "speed": speed}
    host_bytes = given.host_memory or _host_bytes(experiment, tiny=given.tiny)
    results: dict[str, Any] = {}
    second: list[list[int]] | None = None
    for name, size in (("tier", host_bytes), ("off", None)):
        results[name], second = measure(tiny() if given.tiny else given.model, experiment, size, second, **more)
        took, ready = (results[name][key] for key in ("seconds", "start_seconds"))
        CONSOLE.print(f"{name}: {took:.1f} s, of which {ready:.1f} to start")
    found = rows(results["tier"], results["off"], rate, experiment)
    notes = {
        "conversations": f"{experiment.conversations} of {experiment.length} tokens, of which {experiment.fit} fit",
        "link GB/s": "-" if rate is None else rate / 1e9,
        "host memory GiB": host_bytes / GIB,
    }
    report.save("kv_tier", limits.device_name(device), found, notes, given.out, results)
    report.show("kv_tier", found)


def _asked(given: argparse.Namespace) -> Experiment:
    return Experiment(given.conversations, given.length, fit=given.fit, others=given.others)


def _host_bytes(experiment: Experiment, *, tiny: bool) -> int:
    """Host memory for all conversations, and those who decode beside them."""
    per_token = 2 * 2 * 16 * 4 if tiny else 2 * 32 * 8 * 128 * 2  # in fp32, and of an 8B in bf16
    others = experiment.others * -(-experiment.other_length // experiment.block_size)
    return ((experiment.conversations + 1) * experiment.blocks_each + others) * experiment.block_size * per_token


if __name__ == "__main__":
    main()
