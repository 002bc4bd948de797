"""Layers in host memory and on disk: how near decode comes to the link and to the disk, what a budget holds, a trace.

    scripts/bench offload --only host,int4,batch --out DIR

Weights are random, made while a model is loaded, so that nothing has to be on a disk. Parts (--only):
  host    70B, 40 of its 80 layers, all streamed from page-locked memory: decode of a few requests
  int4    the same with int4 weights, which travel as they are
  batch   96 requests of 512 prompt and 32 new tokens on both
  disk    some layers of the 8B from a file
  context a long context with the pages of most layers in host memory, beside one with all on the device
  plan    placements that the planner's efficiencies were taken from (with those above)
  frozen  placements that were chosen after that
  cpu     on a CPU: a model of 1.6 GB from a file with a fifth of it in memory: memory in use, and the rate of reads
What the planner says of each run stands beside it.
Each case is a process of its own. Rates of link, disk and device are measured in it, before the model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import report
from outpace.bench.drive import Run, run
from outpace.bench.shapes import DEVIATION, SHAPES, config_of
from outpace.bench.workload import Item
from outpace.config import LLMConfig
from outpace.heap import give_memory_back
from outpace.inject.paged import MICRO_TOKENS
from outpace.kernels import limits
from outpace.llm_engine import LLMEngine
from outpace.loading.build import Found
from outpace.loading.numbers import numbers_of, precisions
from outpace.loading.skeleton import skeleton
from outpace.loading.weights import Piece, Source, Weights
from outpace.offload.disk import read_rate
from outpace.offload.numbers import Rates, Work
from outpace.offload.place import Placement, Tier
from outpace.offload.predict import Schedule, predict
from outpace.offload.store import ReadOptions, aligned
from outpace.prepare import load_paged

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
    options: Mapping[str, Any] = field(default_factory=dict)
    traced: bool = False


ALL_AWAY = {"cpu_offload_gb": 1e6}
SMALL = {"max_model_len": 1024}
FEW = {"max_num_seqs": 8, "max_num_batched_tokens": 1024}
LONG = {"max_model_len": 32768, "max_num_seqs": 1, "max_num_batched_tokens": 4096}
ALL_SHAPES: Mapping[str, Mapping[str, Any]] = {
    **SHAPES,
    "small": {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    },
}  # fmt: skip
PART = 0.2  # of a model that may be in a CPU's memory
CASES: Mapping[str, Sequence[Case]] = {
    "host": (
        Case("70B x 40, bf16", "llama-3.1-70b", 40, {**ALL_AWAY, "device_memory": "40GB"}, ((8, 64, 8), (96, 512, 32)),
             options={**SMALL, "max_num_seqs": 96, "max_num_batched_tokens": 8192}, traced=True),
    ),
    "int4": (
        Case("70B x 40, int4", "llama-3.1-70b", 40, {**ALL_AWAY, "device_memory": "40GB"}, ((8, 64, 8), (96, 512, 32)),
             "int4", {**SMALL, "max_num_seqs": 96, "max_num_batched_tokens": 8192}, traced=True),
    ),
    "disk": (
        Case("8B x 12, bf16, disk", "llama-3.1-8b", 12, {"device_memory": "6GB", "host_memory": "1.6GB"},
             ((8, 64, 5),), options={**SMALL, "max_num_seqs": 8, "max_num_batched_tokens": 1024}),
    ),
    "context": (
        Case("8B, 32k tokens, pages on the device", "llama-3.1-8b", 32, {"device_memory": "40GB"}, ((1, 32000, 8),),
             options=LONG),
        Case("8B, 32k tokens, pages of most layers in host memory", "llama-3.1-8b", 32,
             {"device_memory": "20GB", "host_pages": "6GB"}, ((1, 32000, 8),), options=LONG),
    ),
    "plan": (
        Case("8B, bf16, all away, alone", "llama-3.1-8b", 32, ALL_AWAY, ((1, 128, 32),), options={**SMALL, **FEW}),
        Case("8B, bf16, half stays", "llama-3.1-8b", 32, {"device_memory": "16GB"}, ((32, 512, 32),),
             options={**SMALL, "max_num_seqs": 32}),
    ),
    "frozen": (
        Case("8B, int8, all away", "llama-3.1-8b", 32, ALL_AWAY, ((64, 256, 32),), "int8",
             {**SMALL, "max_num_seqs": 64}),
        Case("8B, bf16, most stays", "llama-3.1-8b", 32, {"device_memory": "18GB"}, ((16, 512, 64),),
             options={**SMALL, "max_num_seqs": 16}),
        Case("70B x 20, bf16, some stay", "llama-3.1-70b", 20, {"device_memory": "30GB"}, ((16, 256, 16),),
             options={**SMALL, "max_num_seqs": 16}),
        Case("8B x 16, bf16, host and disk", "llama-3.1-8b", 16, {"device_memory": "6GB", "host_memory": "4GB"},
             ((8, 128, 8),), options={**SMALL, **FEW}),
    ),
    "cpu": (
        Case("1.6 GB on a CPU, disk", "small", 24, {"host_memory": 0}, ((1, 16, 12),),
             options={"max_model_len": 64, "max_num_seqs": 1, "device": "cpu"}),
    ),
    "tiny": (
        Case("tiny", "tiny", 6, ALL_AWAY, ((3, 8, 4),), options={**SMALL, "max_num_seqs": 4, "num_blocks": 16}),
    ),
}  # fmt: skip


def random_model(shape: str, layers: int, dtype: torch.dtype) -> Found:
    """A model of a shape whose weights are made when they are read: matrices from one pool of values, vectors of 1."""
    config = config_of({**ALL_SHAPES[shape], "num_hidden_layers": layers})
    model = skeleton(config, dtype)
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
    return Found(model, Weights("random", sources), None, f"{shape}, {layers} layers", Path(), dtype, "asked for")


class Watch:
    """The most memory of a GPU that was ever in use, by anybody."""

    def __init__(self, device: torch.device) -> None:
        self.most, self._device, self._over = 0, device, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            free, total = torch.cuda.mem_get_info(self._device)
            self.most = max(self.most, total - free)

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most


def link_rate(device: torch.device, size: int = 1 << 30, turns: int = 6) -> float:
    """Bytes per second from page-locked memory, by copies as large as layers, one after the other."""
    source, target = aligned(size, pinned=True), torch.empty(size, dtype=torch.uint8, device=device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(turns):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return turns * size / (time.perf_counter() - begin)


def overlap(engine: LLMEngine, items: Sequence[Item]) -> dict[str, float]:
    """A trace of some steps: how much of the kernels' time copies run too, and how much of all time copies run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run(engine, items)
    copies, kernels = [], []
    for event in seen.events() or ():
        if event.device_type.name != "CUDA":
            continue
        span = (event.time_range.start, event.time_range.end)
        if "HtoD" in event.name:
            copies.append(span)
        elif not event.name.startswith(("Mem", "gpu_")):
            kernels.append(span)
    large = [span for span in copies if span[1] - span[0] > 100]  # microseconds
    kernels, large = _union(kernels), _union(large)
    both = _common(kernels, large)
    inside = [span for span in kernels if large and large[0][0] <= span[0] <= large[-1][1]]
    whole = large[-1][1] - large[0][0] if large else 0.0
    return {
        "kernel_seconds": _length(kernels) / 1e6,
        "copy_seconds": _length(large) / 1e6,
        "kernels_beside_copies": _common(inside, large) / max(_length(inside), 1e-9),
        "copies_of_all_time": _length(large) / max(whole, 1e-9),
        "both_seconds": both / 1e6,
    }


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _common(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    total, place = 0.0, 0
    for begin, end in left:
        while place and right[place - 1][1] > begin:
            place -= 1
        while place < len(right) and right[place][1] <= begin:
            place += 1
        at = place
        while at < len(right) and right[at][0] < end:
            total += min(end, right[at][1]) - max(begin, right[at][0])
            at += 1
    return total


def items_of(count: int, prompt: int, new: int, vocab: int) -> list[Item]:
    """Requests of equal lengths with different tokens."""
    generator = torch.Generator().manual_seed(count)
    return [Item(torch.randint(3, vocab, (prompt,), generator=generator).tolist(), new) for _ in range(count)]


def step_seconds(done: Run) -> float:
    """The median time between tokens of the request that ended last: decode steps with all requests in them."""
    last = max(done.traces, key=lambda trace: trace.times[-1])
    return statistics.median(last.gaps[-max(1, len(last.gaps) // 2) :])


def measure(case: Case) -> dict[str, Any]:
    """One case, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts: dict[str, Any] = {"case": case.name, "layers": case.layers, "quantization": case.quantization}
    offload = dict(case.offload)
    with tempfile.TemporaryDirectory(dir=os.environ.get("OUTPACE_NVME")) as folder:
        speed = limits.measure_speed(device, dtype)
        facts |= {"bandwidth": speed.bandwidth, "flops": speed.flops}
        if device.type == "cuda":
            facts["link"] = link_rate(device)
            torch.cuda.empty_cache()
        if "disk" in case.name:
            offload["nvme"] = folder
        watch = Watch(device) if device.type == "cuda" else None
        given: dict[str, Any] = {**case.options, "offload": offload, "enable_prefix_caching": False, "dtype": dtype}
        if case.quantization is not None:
            given["quantization"] = case.quantization
        config = LLMConfig.of(None, **given)
        found = random_model(case.shape, case.layers, dtype)
        if device.type == "cpu":
            total = sum(tensor.numel() for tensor in found.model.state_dict().values()) * dtype.itemsize
            offload.setdefault("device_memory", int(PART * total))
            config, facts["model_bytes"] = LLMConfig.of(None, **{**given, "offload": offload}), total
            _first_run(dtype)
            before = _memory(reset=True)
        begin = time.perf_counter()
        parts = load_paged(found, config, tokenizer=False)
        engine = LLMEngine(parts)
        facts["start_seconds"] = time.perf_counter() - begin
        facts["start"] = {**parts.seconds, **engine.startup_seconds}
        facts |= _placed(engine, config)
        vocab = ALL_SHAPES[case.shape]["vocab_size"]
        run(engine, items_of(4, 16, 3, vocab))
        if device.type == "cpu":
            facts["most_device_bytes"] = _memory() - before  # reads that are timed take some, too
        if facts["bytes"].get("disk"):
            facts["disk"] = read_rate(_open_file())
            facts["disk_threads"] = read_rate(_open_file(), threads=ReadOptions().threads)
        facts["runs"] = [_run(engine, each, vocab, facts) for each in case.work]
        if case.traced:
            facts["trace"] = overlap(engine, items_of(8, 16, 3, vocab))
        if watch is not None:
            facts["most_device_bytes"] = watch.end()
        engine.close()
    return facts


def _first_run(dtype: torch.dtype) -> None:
    """What a process takes for its libraries, once, is not the model's."""
    config = LLMConfig.of(None, device="cpu", dtype=dtype, num_blocks=4, max_num_seqs=2)
    engine = LLMEngine(load_paged(random_model("tiny", 2, dtype), config, tokenizer=False))
    run(engine, items_of(2, 8, 3, ALL_SHAPES["tiny"]["vocab_size"]))
    engine.close()
    give_memory_back()


def _memory(*, reset: bool = False) -> int:
    """The most memory that this process has had since the last reset; with a reset: what it has now."""
    status = Path("/proc/self/status").read_text()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmRSS:" if reset else "VmHWM:"
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def _open_file() -> str:
    """The file of layers that this process has open, which has no name."""
    for path in Path("/proc/self/fd").iterdir():
        if path.exists() and ".writing (deleted)" in str(path.readlink()):
            return str(path)
    raise FileNotFoundError("no file of layers is open")


def predicted(facts: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """What the planner says of a run, and of one of its decode steps, from the rates of its process."""
    case = next(case for part in CASES.values() for case in part if case.name == facts["case"])
    dtype = torch.bfloat16 if "link" in facts else torch.float32
    config = config_of({**ALL_SHAPES[case.shape], "num_hidden_layers": case.layers})
    numbers = numbers_of(skeleton(config, dtype), dtype)
    tiers = facts["tiers"] if sum(facts["tiers"].values()) else {"device": case.layers}
    named: list[Tier] = [tier for tier in ("host", "disk", "device") for _ in range(tiers.get(tier, 0))]
    count, tokens = found["requests"], found["max_num_batched_tokens"]
    micro = min(tokens, MICRO_TOKENS)
    rates = Rates(facts["bandwidth"], facts["flops"], facts.get("link"), facts.get("disk_threads", facts.get("disk")))
    work, schedule = Work(found["prompt"], found["new"], count), Schedule(count, micro, -(-tokens // micro))
    precision = case.quantization or precisions(dtype)[0]
    said = predict(numbers, precision, Placement(tuple(named), 2), schedule, rates, work)
    return {
        "predicted_seconds": said.seconds,
        "predicted_step_seconds": said.decode.total,
        "predicted_of_measured": said.seconds / found["seconds"],
    }


def _placed(engine: LLMEngine, config: LLMConfig) -> dict[str, Any]:
    from outpace.offload.asked import device_budget

    streaming = engine.streaming
    tiers = () if streaming is None else streaming.placement.tiers
    held = {} if streaming is None else streaming.tier_bytes()
    counts = {tier: tiers.count(tier) for tier in ("device", "host", "disk")}
    pool = engine.scheduler.pool
    return {"tiers": counts, "bytes": held, "budget": device_budget(config), "num_blocks": pool.num_blocks}


def _run(engine: LLMEngine, work: tuple[int, int, int], vocab: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    count, prompt, new = work
    before = engine.totals.steps
    done = run(engine, items_of(count, prompt, new, vocab))
    steps, step = engine.totals.steps - before, step_seconds(done)
    held = facts["bytes"]
    streamed, on_disk = held.get("host", 0) + held.get("disk", 0), held.get("disk", 0)
    found = {"requests": count, "prompt": prompt, "new": new, "seconds": done.seconds, "steps": steps}
    found |= {"tokens_per_second": count * new / done.seconds, "step_seconds": step}
    found["max_num_batched_tokens"] = engine.scheduler.max_num_batched_tokens
    if "link" in facts and streamed:
        limit = streamed / facts["link"]
        found |= {"rate": streamed / step, "of_link": limit / step, "limit_tokens_per_second": count / limit}
        found["of_limit"] = done.seconds and steps * limit / done.seconds
    if on_disk:
        found |= {"disk_rate": on_disk / step, "of_disk": on_disk / step / facts["disk"]}
    return found


def rows_of(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each run of a case."""
    return [
        {
            "case": facts["case"],
            "work": f"{each['requests']} x {each['prompt']}/{each['new']}",
            "tokens/s": each["tokens_per_second"],
            "step s": each["step_seconds"],
            "GB/s": each.get("rate", 0.0) / GB,
            "link GB/s": facts.get("link", 0.0) / GB,
            "of link": each.get("of_link", 0.0),
            "of disk": each.get("of_disk", 0.0),
            "said/was": predicted(facts, each)["predicted_of_measured"],
            "device GB": facts.get("most_device_bytes", 0) / GB,
            "budget GB": facts["budget"] / GB,
            "streamed GB": sum(size for place, size in facts["bytes"].items() if place != "slots") / GB,
        }
        for each in facts["runs"]
    ]


def join(files: Sequence[Path], folder: Path) -> None:
    """One table and a picture of the cases of several runs; of cases that were measured twice the last counts."""
    read = [json.loads(path.read_text()) for path in files]
    found = {facts["case"]: facts for content in read for facts in content["details"]["cases"]}
    save(read[0]["device"], list(found.values()), folder)
    draw([(facts, each) for facts in found.values() for each in facts["runs"]], read[0]["device"], folder)


def save(device: str, found: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write what was measured, with what the planner says of it."""
    for facts in found:
        for each in facts["runs"]:
            each.setdefault("max_num_batched_tokens", 8192)
            each |= predicted(facts, each)
    rows = [row for facts in found for row in rows_of(facts)]
    report.save("offload", device, rows, {}, folder, {"cases": found})
    report.show("offload", rows)


def draw(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], device: str, folder: Path) -> None:
    """What the planner says beside what was measured, of each run."""
    import matplotlib.pyplot as plt

    names = [f"{facts['case']}\n{each['requests']} x {each['prompt']}/{each['new']}" for facts, each in runs]
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(runs) + 1.5), layout="constrained")
    places = range(len(runs))
    speeds = [
        [each["requests"] * each["new"] / each[key] for _, each in runs] for key in ("seconds", "predicted_seconds")
    ]
    axes.barh([place - 0.2 for place in places], speeds[0], 0.4, label="measured")
    axes.barh([place + 0.2 for place in places], speeds[1], 0.4, label="predicted")
    for place, (was, said) in enumerate(zip(*speeds, strict=True)):
        axes.text(max(was, said) * 1.05, place, f"{was:.3g} / {said:.3g}", va="center", fontsize=8)
    axes.set(xscale="log", xlabel="output tokens per second", title=f"Placements of layers on {device}")
    axes.set_yticks(list(places), names, fontsize=8)
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(report.picture("offload", device, "predicted", folder), dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure what is asked for, each case in a process of its own."""
    options = report.parser(__doc__)
    options.add_argument("--only", default="host,int4,disk", help=f"parts, of {', '.join(CASES)}")
    options.add_argument("--case", help=argparse.SUPPRESS)
    options.add_argument("--join", nargs="+", type=Path, help="results of several runs, to be written as one")
    asked = options.parse_args()
    if asked.case:
        part, number = asked.case.split(":")
        sys.stdout.write("\n" + json.dumps(measure(CASES[part][int(number)])) + "\n")
        return
    if asked.join:
        join(asked.join, asked.out)
        return
    if unknown := sorted({*asked.only.split(",")} - {*CASES}):
        options.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(CASES)}")
    device = limits.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found: list[dict[str, Any]] = []
    for part in asked.only.split(","):
        for number, case in enumerate(CASES[part]):
            command = [sys.executable, "-m", "bench.offload", "--case", f"{part}:{number}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.stderr.write(f"{case.name}: failed with {done.returncode}\n")
                continue
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
            save(device, found, asked.out)


if __name__ == "__main__":
    main()
