"""The best tiles of the batch-invariant product for the linear layers of Llama-3.1-8B, beside cuBLAS.

Every product is timed in one CUDA graph of several launches, each with a weight of its own, so that the L2 cache holds
none. Tiles are compiled by several processes first; those that fail are skipped, and those whose result is not bit for
bit that of the default tiles for 2048 rows are marked. Run on a GPU:

    python -m bench.matmul_sweep --out DIR --seconds 60

and its logic alone on a CPU: TRITON_INTERPRET=1 python -m bench.matmul_sweep --tiny --out DIR
"""

import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import report
from bench.gemv_sweep import CONSOLE, WORST, attempt, launch_time
from outpace.kernels import limits
from outpace.kernels.matmul import MatmulTiles, chunk_depth, matmul_invariant_triton, matmul_tiles
from outpace.kernels.triton_stub import triton

DTYPE = torch.bfloat16
GRAPH_BYTES = 1 << 30  # of weights that a graph of few rows reads
GRAPH_FLOPS = 2e12  # of a graph of many
ROWS = (1, 16, 64, 256, 2048)
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
TINY = {"o": (6, 1100), "up": (70, 40)}


@dataclass(frozen=True)
class Case:
    """One linear layer for so many rows."""

    layer: str
    outputs: int
    depth: int
    rows: int

    @property
    def chunks(self) -> int:
        """In how many chunks its depth is cut."""
        return -(-self.depth // chunk_depth(self.outputs, self.depth))

    @property
    def bytes(self) -> int:
        """What a launch must read and write."""
        return 2 * (self.outputs * self.depth + self.rows * (self.outputs + self.depth))

    @property
    def flops(self) -> int:
        """Operations of a launch."""
        return 2 * self.rows * self.outputs * self.depth

    @property
    def launches(self) -> int:
        """Launches of a graph."""
        return int(max(1, min(GRAPH_BYTES // (2 * self.outputs * self.depth), GRAPH_FLOPS // self.flops)))


def choices(case: Case) -> list[MatmulTiles]:
    """The tiles worth a try, the default first; split only where there are chunks to split."""
    found = [matmul_tiles(case.rows, case.outputs, case.depth, DTYPE)]
    if case.rows <= 64:
        for block_n, block_k, stages in itertools.product((16, 32, 64, 128), (64, 128), (3, 4, 5)):
            if (64 + block_n) * block_k * 2 * stages <= 120 << 10:  # bytes: two programs per SM
                found.append(MatmulTiles(64, block_n, block_k, 4, stages))
    else:
        for block_m, block_n, stages in itertools.product((64, 128), (64, 128, 256), (3, 4)):
            found.append(MatmulTiles(block_m, block_n, 64, 8 if block_m * block_n > 8192 else 4, stages))
        found.append(MatmulTiles(256, 128, 64, 8, 3))
        found += [replace(tiles, group_m=group) for tiles in found[:1] for group in (4, 16)]
    if case.chunks > 1 and case.rows <= 256:
        found += [replace(tiles, split=not tiles.split) for tiles in found]
    elif case.chunks > 1:
        found = [replace(tiles, split=False) for tiles in found]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Operands:
    """The tensors of one case: copies of the weight to rotate among."""

    x: Tensor
    weights: Sequence[Tensor]
    out: Tensor

    def invariant(self, tiles: MatmulTiles, i: int) -> None:
        """Launches the product with the i-th weight."""
        matmul_invariant_triton(self.x, self.weights[i], out=self.out, tiles=tiles)

    def cublas(self, i: int) -> None:
        """The same by cuBLAS."""
        F.linear(self.x, self.weights[i])


def compile_some(jobs: Sequence[tuple[Case, MatmulTiles]], device: torch.device) -> None:
    """Compiles into Triton's cache on disk, by launches on few outputs that have as many chunks, one or more."""
    torch.set_num_threads(1)  # of many processes
    for case, tiles in jobs:
        outputs = 64 if case.chunks > 1 else 16384
        x, weight = (torch.zeros(rows, case.depth, dtype=DTYPE, device=device) for rows in (case.rows, outputs))
        attempt(partial(matmul_invariant_triton, x, weight, tiles=tiles))
        torch.cuda.synchronize()


def compile_all(cases: Sequence[Case], device: torch.device, workers: int) -> None:
    """Compiles every kernel that is to be timed."""
    jobs = {
        (case.rows <= 64, case.chunks, tiles): (case, tiles) for case in cases for tiles in choices(case)
    }  # what a compiled kernel depends on; the number of chunks is that of the kernel which adds them
    parts = [list(jobs.values())[start::workers] for start in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_some, part, device) for part in parts]:
            attempt(future.result)
    CONSOLE.print(f"compiled {len(jobs)} kernels")


def sweep(cases: Sequence[Case], device: torch.device, deadline: float, save: Callable[[dict[str, Any]], None]) -> None:
    """Times every choice of the cases of one layer."""
    kind: dict[str, Any] = {"dtype": DTYPE, "device": device}
    outputs, depth, most = cases[0].outputs, cases[0].depth, max(case.rows for case in cases)
    copies = max(case.launches for case in cases) if device.type == "cuda" else 1
    x = torch.randn(most, depth, **kind)
    weights = [torch.randn(outputs, depth, **kind) / depth**0.5 for _ in range(copies)]
    want = matmul_invariant_triton(x, weights[0])
    for case in cases:
        operands = Operands(x[: case.rows], weights[: case.launches], torch.empty(case.rows, outputs, **kind))
        times: dict[MatmulTiles, float] = {}
        wrong: list[dict[str, Any]] = []
        cublas = launch_time(operands.cublas, len(operands.weights), 9)
        for tiles in choices(case):
            if time.monotonic() > deadline:
                break
            worst = WORST * min(times.values(), default=math.inf)
            us = attempt(partial(launch_time, partial(operands.invariant, tiles), len(operands.weights), 5, worst))
            if us is None:
                continue
            operands.invariant(tiles, 0)
            if not torch.equal(operands.out, want[: case.rows]):
                wrong.append(asdict(tiles))
            elif us < math.inf:
                times[tiles] = us
        if times:
            save(row(case, times, cublas, wrong))


def row(case: Case, times: Mapping[MatmulTiles, float], cublas: float, wrong: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found for a case: the best tiles, the default ones, and all that were timed, best first."""
    ordered = sorted(times.items(), key=lambda item: item[1])
    best, us = ordered[0]
    default = times.get(matmul_tiles(case.rows, case.outputs, case.depth, DTYPE), math.nan)
    return {
        **asdict(case),
        "chunks": case.chunks,
        "us": us,
        "GB/s": case.bytes / us / 1e3,
        "TFLOP/s": case.flops / us / 1e6,
        "cublas_us": cublas,
        "of_cublas": cublas / us,
        "default_us": default,
        "best": asdict(best),
        "other_bits": wrong,
        "timed": [{**asdict(tiles), "us": us} for tiles, us in ordered],
    }


HEADER = "layer      M       N     K chunks  best m/n/k/warps/st/grp       us  default   cuBLAS  ratio    GB/s TFLOP/s"


def line(found: Mapping[str, Any]) -> str:
    """One line of the table."""
    tiles = found["best"]
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m")
    shown = "/".join(str(tiles[name]) for name in names) + (" split" if tiles["split"] else "")
    other = f"  OTHER BITS: {len(found['other_bits'])} tiles" if found["other_bits"] else ""
    return (
        f"{found['layer']:8} {found['rows']:4} {found['outputs']:7} {found['depth']:5} {found['chunks']:4} {shown:>26} "
        f"{found['us']:9.2f} {found['default_us']:8.2f} {found['cublas_us']:8.2f} {found['of_cublas']:6.2f} "
        f"{found['GB/s']:7.0f} {found['TFLOP/s']:7.1f}{other}"
    )


def main() -> None:
    """Sweep every layer and write matmul_sweep.json."""
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="when to begin no more timings")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="numbers of rows")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="which layers")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU under TRITON_INTERPRET=1")
    options = parser.parse_args()
    if options.tiny and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--tiny needs TRITON_INTERPRET=1")
    start = time.monotonic()
    device = torch.device("cpu" if options.tiny else "cuda")
    layers = TINY if options.tiny else {name: LAYERS[name] for name in options.layers}
    rows = [2] if options.tiny else options.rows
    cases = {name: [Case(name, *shape, m) for m in rows] for name, shape in layers.items()}
    if not options.tiny:
        compile_all(list(itertools.chain(*cases.values())), device, max(2, min(14, (os.cpu_count() or 4) - 2)))
    CONSOLE.print(f"compiling done after {time.monotonic() - start:.0f} s")
    found: list[dict[str, Any]] = []

    def save(result: dict[str, Any]) -> None:  # at every row, so that a run that is cut off leaves what it has
        found.append(result)
        notes = {"device": limits.device_name(device), "torch": torch.__version__, "triton": triton.__version__}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "matmul_sweep.json").write_text(json.dumps({**notes, "rows": found}, indent=1) + "\n")

    for i, (name, work) in enumerate(cases.items(), 1):  # each layer gets an equal share of what is left
        left = start + options.seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(cases) - i + 1)
        attempt(partial(sweep, work, device, deadline, save))
        CONSOLE.print(f"{name} done after {time.monotonic() - start:.0f} s")
    CONSOLE.print(HEADER)
    for result in found:
        CONSOLE.print(line(result), soft_wrap=True)


if __name__ == "__main__":
    main()
