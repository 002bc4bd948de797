"""From a folder of safetensors to the first token, by part, beside what the disk cache and the link allow.

The limits are measured in the same run: several threads that read the files into page-locked memory, and copies of such
memory to the device. The files are in the page cache, since they have just been written.

Starts are measured with bytecode present, as pip leaves it after an install, however the packages here were installed:
it is kept in a folder of this run, which a start that is not measured fills. That start has a kernel cache of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench import report
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


def copy_speed(ring: torch.Tensor) -> float:
    """Bytes a second from page-locked memory to the device."""
    there = torch.empty_like(ring, device="cuda")
    return ring.numel() / (limits.gpu_ms(lambda: there.copy_(ring, non_blocking=True)) / 1e3)


def started(
    folder: Path, kernel_cache: Path, bytecode: Path, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, float], dict[str, Any]]:
    """A start in a process of its own: seconds by part, and what else there is to know."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(kernel_cache), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder), json.dumps({**options})],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    parts, details = json.loads(done.stdout.strip().splitlines()[-1])
    return parts, details


def _row(what: str, seconds: float, size: int | None, limit: float | None = None) -> dict[str, Any]:
    """A part: how long it took and, where it moves bytes, how fast, beside the limit."""
    speed = None if size is None else size / seconds / 1e9
    limited = None if size is None else limit
    ratio = None if limited is None else limited / seconds
    return {"what": what, "seconds": seconds, "GB/s": speed, "limit": limited, "limit/seconds": ratio}


def main() -> None:
    """Write a folder, measure the limits, then starts with an empty and a full kernel cache."""
    parser = report.parser(__doc__)
    parser.add_argument("--quantization", default="", help="schemes, each loaded once more: int8,int4,fp8")
    parser.add_argument("--shape", default="llama-3.1-8b", help="shape of the model")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="outpace-loading-"))
    try:
        model: Any = shapes.build(options.shape, torch.bfloat16, "cuda")
        model.save_pretrained(folder / "model", max_shard_size="4GB")
        del model
        torch.cuda.empty_cache()
        files = sorted((folder / "model").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        ring = torch.empty(RING, CHUNK, dtype=torch.uint8, pin_memory=True)
        ring.zero_()
        rows: list[dict[str, Any]] = []
        reads = {threads: read_speed(files, threads, ring) for threads in THREADS}
        for threads, speed in reads.items():
            rows.append(_row(f"read, {threads} threads", size / speed, size))
        copy = copy_speed(ring)
        rows.append(_row("copy to the device", size / copy, size))
        limit = size / min(copy, max(reads.values()))
        details: dict[str, Any] = {}
        started(folder / "model", folder / "other kernels", folder / "bytecode")
        for state in ("empty", "full"):
            parts, known = started(folder / "model", folder / "kernels", folder / "bytecode")
            details[state] = {**parts, **known}
            for part, took in parts.items():
                streams = part == "weights"
                rows.append(_row(f"{part}, kernel cache {state}", took, size if streams else None, limit))
        for scheme in filter(None, options.quantization.split(",")):
            parts, known = started(folder / "model", folder / "kernels", folder / "bytecode", {"quantization": scheme})
            details[scheme] = {**parts, **known}
            rows += [
                _row(f"{part}, {scheme}", parts[part], size if part == "weights" else None)
                for part in ("weights", "all")
            ]
            for name in KEPT:
                rows.append({**_row(f"{name}, {scheme}", 0.0, None), "seconds": None, "GB": known[name]})
        device = limits.device_name(torch.device("cuda"))
        known = details["full"]
        notes = {"model": options.shape, "GB": size / 1e9, "files": len(files), **{name: known[name] for name in KEPT}}
        notes["bytecode"] = "present, as after an install"
        report.save("loading", device, rows, notes, options.out, details)
        report.show("loading", rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
