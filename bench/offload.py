"""Layers in host memory and on disk: how near decode comes to the limits of the link and of the disk.

    scripts/bench offload --only host,int4

Weights are random and made while a model is loaded, so no checkpoint is needed. Parts (--only):
  host    70B, 40 of its 80 layers, all streamed from page-locked memory: decode of a few requests, and 96 requests of
          512 prompt and 32 new tokens
  int4    the same with int4 weights, which travel as they are
  disk    some layers of the 8B from a file
  context a long context with the pages of most layers in host memory, compared with all pages on the device
  plan    placements from which the planner's efficiencies were derived (with those above)
  frozen  placements that were chosen after that
  cpu     on a CPU: a model of 1.6 GB from a file with a fifth of it in memory
Each run is compared with the planner's prediction. Each case is a process of its own, which first measures the rates
of the link, the disk and the device.
"""

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.report import DEVICE, DTYPE, Found, Report, row
from outpace.bench.drive import run
from outpace.bench.figures import Run
from outpace.bench.shapes import DEVIATION, SHAPES, config_of
from outpace.bench.workload import Item, uniform
from outpace.config import LLMConfig
from outpace.heap import give_memory_back
from outpace.inject.paged import MICRO_TOKENS
from outpace.kernels import limits
from outpace.llm_engine import LLMEngine
from outpace.load_paged import load_paged
from outpace.loading import build
from outpace.loading.numbers import numbers_of, precisions
from outpace.loading.skeleton import skeleton
from outpace.loading.weights import Piece, Source, Weights
from outpace.offload.asked import device_budget
from outpace.offload.disk import read_rate
from outpace.offload.numbers import Rates, Work
from outpace.offload.place import Placement, Tier
from outpace.offload.predict import Schedule, predict
from outpace.offload.store_read import ReadOptions

GB = 1e9


@dataclass(frozen=True)
class Case:
    """A model, a placement and work to do."""

    name: str
    shape: str
    layers: int
    offload: Mapping[str, Any]
    work: tuple[tuple[int, int, int], ...]
    """Requests, prompt tokens, new tokens: one run each."""
    quantization: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """More options of `LLM`."""

    @property
    def config(self) -> Any:
        """The config for Hugging Face."""
        return config_of({**ALL_SHAPES[self.shape], "num_hidden_layers": self.layers})

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        return int(ALL_SHAPES[self.shape]["vocab_size"])

    @property
    def options(self) -> dict[str, Any]:
        """Options of `LLM`, with slots for the largest run."""
        return {"max_model_len": 1024, "max_num_seqs": max(count for count, *_ in self.work), **self.more}


ALL_AWAY = {"cpu_offload_gb": 1e6}
AWAY_40 = {**ALL_AWAY, "device_memory": "40GB"}
LONG = {"max_model_len": 32768, "max_num_batched_tokens": 4096}
ALL_SHAPES: Mapping[str, Mapping[str, Any]] = {
    **SHAPES,
    "1.6 GB": {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    },
}  # fmt: skip
PART = 0.2  # fraction of a model in a CPU's memory
CASES: Mapping[str, Sequence[Case]] = {
    "host": (
        Case("70B x 40, bf16", "llama-3.1-70b", 40, AWAY_40, ((8, 64, 8), (96, 512, 32)),
             more={"max_num_batched_tokens": 8192}),
    ),
    "int4": (
        Case("70B x 40, int4", "llama-3.1-70b", 40, AWAY_40, ((8, 64, 8), (96, 512, 32)), "int4",
             {"max_num_batched_tokens": 8192}),
    ),
    "disk": (
        Case("8B x 12, bf16, disk", "llama-3.1-8b", 12, {"device_memory": "6GB", "host_memory": "1.6GB"},
             ((8, 64, 5),), more={"max_num_batched_tokens": 1024}),
    ),
    "context": (
        Case("8B, 32k tokens, pages on the device", "llama-3.1-8b", 32, {"device_memory": "40GB"}, ((1, 32000, 8),),
             more=LONG),
        Case("8B, 32k tokens, pages of most layers in host memory", "llama-3.1-8b", 32,
             {"device_memory": "20GB", "host_pages": "6GB"}, ((1, 32000, 8),), more=LONG),
    ),
    "plan": (
        Case("8B, bf16, all away, alone", "llama-3.1-8b", 32, ALL_AWAY, ((1, 128, 32),),
             more={"max_num_seqs": 8, "max_num_batched_tokens": 1024}),
        Case("8B, bf16, half stays", "llama-3.1-8b", 32, {"device_memory": "16GB"}, ((32, 512, 32),)),
    ),
    "frozen": (
        Case("8B, int8, all away", "llama-3.1-8b", 32, ALL_AWAY, ((64, 256, 32),), "int8"),
        Case("8B, bf16, most stays", "llama-3.1-8b", 32, {"device_memory": "18GB"}, ((16, 512, 64),)),
        Case("70B x 20, bf16, some stay", "llama-3.1-70b", 20, {"device_memory": "30GB"}, ((16, 256, 16),)),
        Case("8B x 16, bf16, host and disk", "llama-3.1-8b", 16, {"device_memory": "6GB", "host_memory": "4GB"},
             ((8, 128, 8),), more={"max_num_batched_tokens": 1024}),
    ),
    "cpu": (
        Case("1.6 GB on a CPU, disk", "1.6 GB", 24, {"host_memory": 0}, ((1, 16, 12),),
             more={"max_model_len": 64, "device": "cpu"}),
    ),
    "tiny": (
        Case("tiny", "tiny", 6, {"device_memory": 260_000}, ((3, 8, 4),), more={"max_num_seqs": 4, "num_blocks": 16}),
    ),
}  # fmt: skip
ONE_CASE = """
import json, sys
from bench.offload import CASES, measure
print(json.dumps(measure(CASES[sys.argv[1]][int(sys.argv[2])])))
"""


def random_model(case: Case) -> build.Found:
    """A model whose weights are made when they are read: matrices from one pool of random values, vectors of 1."""
    model, dtype = skeleton(case.config, DTYPE), DTYPE
    tensors = dict(model.state_dict())
    most = max(tensor.numel() for tensor in tensors.values())
    pool = torch.empty(min(most, 1 << 20)).normal_(0, DEVIATION).to(dtype).repeat(-(-most // (1 << 20)))

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        """Called when the tensor is read."""
        count = torch.Size(shape).numel()
        return (pool[:count] if len(shape) > 1 else torch.ones(count, dtype=dtype)).view(shape)

    sources = {}
    for name, tensor in tensors.items():
        size = tuple(tensor.shape)
        sources[name] = Source(size, dtype, (Piece(partial(made, size), size, dtype),))
    return build.Found(model, Weights("random", sources), None, case.name, Path(), dtype, "asked for")


def items_of(count: int, prompt: int, new: int, vocab: int) -> list[Item]:
    """Requests of equal lengths with different tokens."""
    return uniform(vocab, count, count, prompt=(prompt, prompt), output=(new, new))


def step_seconds(done: Run[Any]) -> float:
    """Median seconds of a decode step with all requests: gaps in the second half of the request that ended last."""
    last = max(done.traces, key=lambda trace: trace.times[-1])
    return statistics.median(last.gaps[-max(1, len(last.gaps) // 2) :])


def measure(case: Case) -> Found:
    """Measure one case in this process."""
    speed = limits.measure_speed(DEVICE, DTYPE)
    facts: dict[str, Any] = {"bandwidth": speed.bandwidth, "flops": speed.flops, "link": None, "disk": None}
    if DEVICE.type == "cuda":
        facts["link"] = limits.link_bandwidth(DEVICE)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=os.environ.get("OUTPACE_NVME")) as folder:
        found, offload = random_model(case), dict(case.offload) | ({"nvme": folder} if "disk" in case.name else {})
        if DEVICE.type == "cpu":
            total = sum(tensor.numel() for tensor in found.model.state_dict().values()) * DTYPE.itemsize
            offload.setdefault("device_memory", int(PART * total))
            first_run()
        before = memory(reset=True)
        given = {**case.options, "offload": offload, "enable_prefix_caching": False, "dtype": DTYPE}
        config = LLMConfig.of(None, **given, **({"quantization": case.quantization} if case.quantization else {}))
        engine = LLMEngine(load_paged(found, config, tokenizer=False))
        run(engine, items_of(4, 16, 3, case.vocab))
        most = memory() - before if DEVICE.type == "cpu" else limits.peak_memory(DEVICE)
        facts |= placed(engine) | {"most_bytes": most, "budget": device_budget(config)}
        if facts["bytes"].get("disk"):
            facts["disk"] = read_rate(open_file(), threads=ReadOptions().threads)
        rows = [row(f"{case.name}: most memory", most / GB, "GB", facts["budget"] / GB)]
        facts["runs"] = [one_run(case, engine, work, facts, rows) for work in case.work]
        engine.close()
    return rows, facts


def first_run() -> None:
    """Run a tiny model, so that memory that libraries allocate once does not count for the model."""
    tiny = CASES["tiny"][0]
    config = LLMConfig.of(None, device="cpu", dtype=DTYPE, num_blocks=4, max_num_seqs=2)
    engine = LLMEngine(load_paged(random_model(tiny), config, tokenizer=False))
    run(engine, items_of(2, 8, 3, tiny.vocab))
    engine.close()
    give_memory_back()


def memory(*, reset: bool = False) -> int:
    """Peak memory of this process since the last reset; with a reset, its memory now."""
    status = Path("/proc/self/status").read_text()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmRSS:" if reset else "VmHWM:"
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def open_file() -> str:
    """The nameless file of layers that this process has open."""
    for path in Path("/proc/self/fd").iterdir():
        if path.exists() and ".writing (deleted)" in str(path.readlink()):
            return str(path)
    raise FileNotFoundError("no file of layers is open")


def placed(engine: LLMEngine) -> dict[str, Any]:
    """Number and bytes of the layers in each tier."""
    if engine.streaming is None:
        return {"tiers": {}, "bytes": {}}
    tiers = engine.streaming.placement.tiers
    counts = {tier: tiers.count(tier) for tier in ("device", "host", "disk")}
    return {"tiers": counts, "bytes": engine.streaming.tier_bytes()}


def one_run(
    case: Case, engine: LLMEngine, work: tuple[int, int, int], facts: Mapping[str, Any], rows: list[report.Row]
) -> dict[str, Any]:
    """A run compared with the planner's prediction, and its decode step with the time to read the streamed bytes."""
    count, prompt, new = work
    done = run(engine, items_of(count, prompt, new, case.vocab))
    step, said = step_seconds(done), predicted(case, work, facts, engine.scheduler.max_num_batched_tokens)
    streamed = {name: facts["bytes"].get(name, 0) for name in ("host", "disk")}
    limit = (streamed["host"] + streamed["disk"]) / facts["link"] if facts["link"] else 0.0
    limit = max(limit, streamed["disk"] / facts["disk"] if facts["disk"] else 0.0)
    what, total = f"{case.name}: {count} x {prompt}/{new}", count * new
    rows.append(row(what, total / done.seconds, "tok/s", None, ("the planner", total / said)))
    rows.append(row(f"{what}, decode step", step * 1e3, "ms", limit * 1e3 if limit else None))
    return {"work": work, "seconds": done.seconds, "predicted_seconds": said, "step_seconds": step, "limit": limit}


def predicted(case: Case, work: tuple[int, int, int], facts: Mapping[str, Any], tokens: int) -> float:
    """Seconds of a run as the planner predicts them, from the rates measured in this process."""
    count, prompt, new = work
    tiers = facts["tiers"] or {"device": case.layers}
    named: list[Tier] = [tier for tier in ("host", "disk", "device") for _ in range(tiers.get(tier, 0))]
    micro = min(tokens, MICRO_TOKENS)
    rates = Rates(facts["bandwidth"], facts["flops"], facts["link"], facts["disk"])
    schedule, precision = Schedule(count, micro, -(-tokens // micro)), case.quantization or precisions(DTYPE)[0]
    numbers = numbers_of(skeleton(case.config, DTYPE), DTYPE)
    said = predict(numbers, precision, Placement(tuple(named), 2), schedule, rates, Work(prompt, new, count))
    return float(said.seconds)


def in_a_process(part: str, number: int) -> Found:
    """One case in a process of its own."""
    rows, facts = report.child("-c", ONE_CASE, part, str(number))
    return rows, facts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the requested parts."""
    options = report.parser(__doc__)
    names = report.names(CASES)
    options.add_argument("--only", type=names, default="host,int4,disk", help=f"parts, of {', '.join(CASES)}")
    asked = options.parse_args(arguments)
    to = Report("offload", asked.out)
    for part in asked.only:
        for number, case in enumerate(CASES[part]):
            to.part(case.name, partial(in_a_process, part, number))
    to.show()


if __name__ == "__main__":
    main()
