"""Seconds from a folder of safetensors to the first token, by part, compared with the page cache and the link.

The limits are measured in the same run: several threads read the files into page-locked memory, and such memory is
copied to the device. The files are in the page cache, since they have just been written.

Starts are measured with bytecode present, as after an install with pip. It is in a folder of this run, which is filled
by a start that is not measured and has another kernel cache.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.report import DEVICE, Found, Report, Row, row
from outpace.bench import shapes
from outpace.kernels import limits

THREADS = (1, 4, 8, 16)
CHUNK = 16 << 20  # bytes of one read
KEPT = (
    *("weights GB", "largest weight GB", "allocated GB after loading", "allocated GB while loading"),
    *("reserved GB after loading", "reserved GB at most"),
)
RING = 64  # chunks of page-locked memory
START = """
import gc, json, logging, sys, time
begin = time.perf_counter()
gc.disable()  # as Outpace does while it imports
import torch
at_torch = time.perf_counter()
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
at_transformers = time.perf_counter()
import outpace
from outpace import LLM, prepare
gc.enable()
imported = time.perf_counter()
details = {"import of torch": at_torch - begin, "import of transformers": at_transformers - at_torch}
details["other imports"] = imported - at_transformers
said = []
noting = logging.Handler()
noting.emit = lambda record: said.append(record.getMessage())
logging.getLogger("outpace").addHandler(noting)
logging.getLogger("outpace").setLevel(logging.DEBUG)
fill = prepare.fill

def watched(module, *rest):
    fill(module, *rest)
    sizes = [each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers())]
    details["allocated GB after loading"] = torch.cuda.memory_allocated() / 1e9
    details["allocated GB while loading"] = torch.cuda.max_memory_allocated() / 1e9
    details["reserved GB after loading"] = torch.cuda.max_memory_reserved() / 1e9
    details["weights GB"], details["largest weight GB"] = sum(sizes) / 1e9, max(sizes) / 1e9

prepare.fill = watched
llm = LLM(sys.argv[1], max_model_len=4096, **json.loads(sys.argv[2]))
ready = time.perf_counter()
llm.generate([[1, 2, 3]], outpace.SamplingParams(max_tokens=1), use_tqdm=False)
parts = {"import": imported - begin, **llm.startup_seconds, "first token": time.perf_counter() - ready}
parts["folder to first token, imports included"] = time.perf_counter() - begin
details["reserved GB at most"] = torch.cuda.max_memory_reserved() / 1e9
details["log"] = said
print(json.dumps([parts, details]))
"""


def read_speed(files: list[Path], threads: int, ring: torch.Tensor) -> float:
    """Bytes a second of reads into page-locked memory."""
    jobs = [(path, offset) for path in files for offset in range(0, path.stat().st_size, CHUNK)]
    handles = {path: os.open(path, os.O_RDONLY) for path in files}
    slots = [memoryview(chunk.numpy()) for chunk in ring]

    def read(number: int) -> int:
        path, offset = jobs[number]
        return os.preadv(handles[path], [slots[number % len(slots)]], offset)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(len(jobs))))
    took = time.perf_counter() - begin
    for handle in handles.values():
        os.close(handle)
    return total / took


def start(model: Path, kernels: str, options: Mapping[str, Any] | None = None) -> tuple[dict[str, float], Any]:
    """Start in a new process; returns the seconds of each part, and details."""
    caches = {"TRITON_CACHE_DIR": str(model.parent / kernels), "PYTHONPYCACHEPREFIX": str(model.parent / "bytecode")}
    environment = {**caches, "PYTHONDONTWRITEBYTECODE": ""}  # empty: it is written
    parts, details = report.child("-c", START, str(model), json.dumps(options or {}), environment=environment)
    return parts, details


def measure_limits(files: list[Path]) -> tuple[list[Row], float]:
    """Seconds of reads by different numbers of threads and of the copy to the device; the slower of both at best."""
    size = sum(path.stat().st_size for path in files)
    ring = torch.zeros(RING, CHUNK, dtype=torch.uint8, pin_memory=True)
    reads = {threads: size / read_speed(files, threads, ring) for threads in THREADS}
    copy = size / limits.link_bandwidth(DEVICE)
    rows = [row(f"read, {threads} threads", took, "s", copy) for threads, took in reads.items()]
    return [*rows, row("copy to the device", copy, "s")], max(copy, min(reads.values()))


def measure(model: Path, to: Report, schemes: Sequence[str]) -> None:
    """Measure the limits, then starts with an empty and a full kernel cache, then a start with each scheme."""
    rows, limit = measure_limits(sorted(model.glob("*.safetensors")))
    to.add("limits", rows)
    start(model, "other kernels")  # writes the bytecode
    for state in ("empty", "full"):
        parts, known = start(model, "kernels")
        of = {"weights": limit}
        rows = [row(f"{part}, kernel cache {state}", took, "s", of.get(part)) for part, took in parts.items()]
        to.add(state, rows, {**parts, **known})
        to.notes |= {name: known[name] for name in KEPT}
    for scheme in schemes:
        to.part(scheme, partial(with_scheme, model, scheme))


def with_scheme(model: Path, scheme: str) -> Found:
    """Seconds and memory of a start with quantized weights."""
    parts, known = start(model, "kernels", {"quantization": scheme})
    rows = [row(f"{part}, {scheme}", parts[part], "s") for part in ("weights", "all")]
    return [*rows, *(row(f"{name}, {scheme}", known[name], "GB") for name in KEPT)], {**parts, **known}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a folder with random weights, and start from it."""
    parser = report.parser(__doc__)
    parser.add_argument("--quantization", default="", help="schemes, each loaded once more: int8,int4,fp8")
    parser.add_argument("--shape", default="llama-3.1-8b", help="shape of the model")
    asked = parser.parse_args(arguments)
    to = Report("loading", asked.out, notes={"model": asked.shape, "bytecode": "present, as after an install"})
    with tempfile.TemporaryDirectory(prefix="outpace-loading-") as folder:
        model: Any = shapes.build(asked.shape, torch.bfloat16, DEVICE)
        model.save_pretrained(Path(folder) / "model", max_shard_size="4GB")
        del model
        torch.cuda.empty_cache()
        measure(Path(folder) / "model", to, [*filter(None, asked.quantization.split(","))])
    to.show()


if __name__ == "__main__":
    main()
