"""The best tiles and splits of the attention kernels, beside the defaults and the read limit.

Decode: every tile with every number of splits, for batches from one long sequence to many short ones. Mixed batches:
one launch of the ragged kernel against one of each kernel. Prefill: tiles for four chunks. Each timing is one CUDA
graph of many launches over several sets of pages, so that the L2 cache holds none. The cases take turns, so that all of
them have had as many tries when the time is over. Kernels are compiled by several processes first. Run on a GPU:

    python -m bench.attention_sweep --out DIR --seconds 120

and its logic alone on a CPU: TRITON_INTERPRET=1 python -m bench.attention_sweep --tiny --out DIR
"""

import itertools
import json
import math
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench import report
from bench.gemv_sweep import attempt, launch_time
from outpace.kernels import limits
from outpace.kernels.attention import paged_attention
from outpace.kernels.attention_decode import (
    DecodeTiles,
    decode_splits,
    decode_tiles,
    paged_attention_decode,
    sm_count,
)
from outpace.kernels.attention_prefill import PrefillTiles, paged_attention_prefill, prefill_tiles
from outpace.kernels.gemv import has_pdl
from outpace.kernels.triton_stub import triton

PAGE = 64
COPY_BYTES = 256 << 20  # pages to rotate among: five times the L2 cache
GRAPH_BYTES = 3 << 30  # read per graph: most of a millisecond, in which its own launch is lost
MAX_LAUNCHES = 60  # per graph
SHARED_BYTES = 200 << 10  # that a program's steps in flight may take
WORST = 1.3  # a choice this much slower than the best so far is not timed again
TOLERANCE = 2e-2  # of outputs whose size is 0.1 or less
CONSOLE = Console(width=150, highlight=False, markup=False)


@dataclass(frozen=True)
class Choice:
    """How a kernel is launched; None and 0 leave it to the kernel."""

    tiles: DecodeTiles | PrefillTiles | None = None
    num_splits: int = 0
    pdl: bool = False
    mixed: bool = False


@dataclass(frozen=True)
class Case:
    """A batch of one kind, and the heads of a model."""

    kind: str  # decode, mixed, prefill
    dim: int
    heads: int
    kv_heads: int
    seqs: tuple[tuple[int, int], ...]  # queries and keys of each
    rows: int  # padding included

    @property
    def name(self) -> str:
        """A few words for the table."""
        what = " + ".join(f"{count} x {q_len}/{n}" for (q_len, n), count in Counter(self.seqs).items() if q_len)
        return f"{self.kind:8}{self.heads:3}/{self.kv_heads} x {self.dim:3}  {what}"

    @property
    def read_bytes(self) -> int:
        """Keys and values, each read once."""
        return 4 * self.kv_heads * self.dim * sum(n for _, n in self.seqs)

    @property
    def operations(self) -> int:
        """Of the two products, over what queries see."""
        seen = sum(q_len * n - q_len * (q_len - 1) // 2 for q_len, n in self.seqs)
        return 4 * self.heads * self.dim * seen


MODELS = ((64, 32, 8), (128, 32, 8), (128, 16, 8))  # head size, query heads, KV heads
DECODES = ((1, 65536), (8, 8192), (64, 1024), (144, 700), (256, 700))  # sequences x keys
SLOTS = 256  # sequences of a mixed step, padding included


def cases(tiny: bool) -> list[Case]:
    """All that is swept."""
    models, decodes = (((16, 4, 2),), ((2, 150),)) if tiny else (MODELS, DECODES)
    found = [Case("decode", *model, ((1, n),) * batch, batch) for model in models for batch, n in decodes]
    scale = 32 if tiny else 1
    chunk, rows, many = 512 // scale, 2048 // scale, 200 // scale
    mixed = [(1, 700 // scale)] * many
    for i in range(3):  # chunks stand anywhere among the decodes
        mixed.insert(i * many // 3, (chunk, chunk))
    mixed += [(0, 0)] * (SLOTS // scale - len(mixed))
    for model in models:
        found.append(Case("mixed", *model, tuple(mixed), rows))
        found += [Case("prefill", *model, ((chunk, chunk + old),) * 4, rows) for old in (0, 1024 // scale)]
    return found


def split_numbers(case: Case, sms: int) -> list[int]:
    """Splits that put 1, 2, ... programs on an SM, or just more or less than fill it; the default first."""
    batch, length = len(case.seqs), max(n for _, n in case.seqs)
    pairs, most = batch * case.kv_heads, -(-length // PAGE)
    found = [decode_splits(batch, case.kv_heads, length, sms)]
    for programs in (1, 2, 3, 4, 6, 8):
        found += [programs * sms // pairs, -(-programs * sms // pairs)]
    return [splits for splits in dict.fromkeys([*found, 2, 3]) if 1 <= splits <= min(most, 128)]


def choices(case: Case, sms: int, *, pdl: bool, tiny: bool = False) -> list[Choice]:
    """The default, then what differs from it in one thing, then all else in a random order that is always the same."""
    if case.kind == "mixed":
        return [Choice(mixed=False), Choice(mixed=True)]
    sizes: dict[str, Sequence[int]] = {"n": (32, 64, 128, 256), "warps": (2, 4, 8), "stages": (2, 3, 4)}
    if tiny:
        sizes = {"n": (16, 32), "warps": (4,), "stages": (2,)}
    grid = list(itertools.product(*sizes.values()))
    group, step = case.heads // case.kv_heads, 4 * case.dim
    if case.kind == "prefill":
        default = prefill_tiles(max(q_len for q_len, _ in case.seqs), group, case.dim, case.dim, 2)
        tiles: list[Any] = [PrefillTiles(m, *numbers) for m in ((16,) if tiny else (64, 128)) for numbers in grid]
        tiles = [t for t in tiles if t.block_n * step * (t.num_stages - 1) <= SHARED_BYTES and t.num_warps >= 4]
        return [Choice(t) for t in dict.fromkeys([default, *tiles])]
    splits = split_numbers(case, sms)
    usual = decode_tiles(group, case.dim, case.dim, 2)
    usual = replace(usual, num_stages=2) if splits[0] == 1 else usual
    tiles = [DecodeTiles(*numbers) for numbers in grid]
    tiles = [t for t in tiles if t.block_n * step * (t.num_stages - 1) <= SHARED_BYTES]
    rest = [Choice(t, s, pdl) for t in tiles for s in splits]
    random.Random(0).shuffle(rest)
    first = [Choice(usual, s, pdl) for s in splits] + [Choice(t, splits[0], pdl) for t in tiles]
    return list(dict.fromkeys([*first, *(Choice(usual, s) for s in splits), *rest]))


@dataclass(frozen=True)
class Operands:
    """The tensors of a case, and sets of pages to rotate among."""

    case: Case
    q: Tensor
    pages: list[tuple[Tensor, Tensor]]
    table: Tensor
    lens: Tensor
    cu_q: Tensor
    out: Tensor

    @classmethod
    def random(cls, case: Case, device: torch.device, copies: int) -> "Operands":
        """Random numbers, pages in a random order."""
        kind: dict[str, Any] = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float16, "device": device}
        counts = [-(-n // PAGE) for _, n in case.seqs]
        ids, table = torch.randperm(sum(counts)), torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for b, some in enumerate(ids.split(counts)):
            table[b, : len(some)] = some
        shape = (sum(counts), PAGE, case.kv_heads, case.dim)
        pages = [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in range(copies)]
        q = torch.randn(case.rows, case.heads, case.dim, **kind)
        lens = torch.tensor([n for _, n in case.seqs])
        cu_q = torch.tensor([0, *(q_len for q_len, _ in case.seqs)]).cumsum(0)
        ints = [x.to(device, torch.int32) for x in (table, lens, cu_q)]
        return cls(case, q, pages, ints[0], ints[1], ints[2], torch.empty_like(q))

    def launch(self, choice: Choice, i: int) -> None:
        """One call on the i-th set of pages."""
        longest = max(n for _, n in self.case.seqs)
        keys, values = self.pages[i % len(self.pages)]
        args = (self.q, keys, values, self.table, self.lens, self.cu_q)
        options: dict[str, Any] = {"scale": self.case.dim**-0.5, "out": self.out}
        if self.case.kind == "decode":
            options |= {"tiles": choice.tiles, "num_splits": choice.num_splits, "pdl": choice.pdl}
            paged_attention_decode(*args, max_len=longest, **options)
        elif self.case.kind == "prefill":
            longest = max(q_len for q_len, _ in self.case.seqs)
            paged_attention_prefill(*args, longest, tiles=choice.tiles, **options)  # type: ignore[arg-type]
        else:
            paged_attention(*args, self.case.rows, mixed=choice.mixed, max_len=longest, **options)

    def result(self, choice: Choice) -> Tensor:
        """What a choice computes; NaN where it wrote nothing."""
        self.out.fill_(float("nan"))
        self.launch(choice, 0)
        return self.out.float()


def compile_one(case: Case, choice: Choice, device: torch.device) -> bool:
    """Compiles into Triton's cache on disk by a launch on a small batch, which needs the same kernel."""
    torch.set_num_threads(1)  # of many processes

    def launch() -> bool:
        small = replace(case, seqs=tuple((min(q_len, 2), min(n, 4 * PAGE)) for q_len, n in case.seqs[:2]), rows=4)
        small = replace(small, rows=len(small.seqs)) if case.kind == "decode" else small
        Operands.random(small, device, 1).launch(replace(choice, num_splits=min(choice.num_splits, 2)), 0)
        torch.cuda.synchronize()
        return True

    return attempt(launch) is True


def kernel(case: Case, choice: Choice) -> Any:
    """What a compiled kernel depends on."""
    return case.kind, case.dim, case.heads, case.kv_heads, choice.tiles, choice.num_splits > 1, choice.pdl


def compiled(jobs: Sequence[tuple[Case, Choice]], device: torch.device, seconds: float) -> set[Any]:
    """Kernels that several processes have compiled in so many seconds, the first jobs first."""
    new = list({kernel(*job): job for job in reversed(jobs)}.items())[::-1]
    ready: set[Any] = set()
    pool = ProcessPoolExecutor(max(2, min(14, (os.cpu_count() or 4) - 2)), multiprocessing.get_context("spawn"))
    futures: dict[Future[bool], Any] = {pool.submit(compile_one, *job, device): key for key, job in new}
    try:
        for future in as_completed(futures, timeout=seconds):
            if future.result():
                ready.add(futures[future])
    except Exception as error:  # late, or a process died: go on with what there is
        CONSOLE.print(f"compiling stopped early: {type(error).__name__} {error}")
    pool.shutdown(wait=False, cancel_futures=True)
    CONSOLE.print(f"compiled {len(ready)} of {len(new)} kernels")
    return ready


@dataclass
class Race:
    """A case, what is still to be tried, and the times so far."""

    operands: Operands
    default: Choice
    waiting: list[Choice]
    times: dict[Choice, float] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Of a graph: enough to lose its own launch, and every set of pages at least once."""
        if not self.operands.q.is_cuda:
            return 1
        copies = len(self.operands.pages)
        return max(copies, min(MAX_LAUNCHES, GRAPH_BYTES // self.operands.case.read_bytes))

    def time(self, choice: Choice, repeats: int, worst: float = math.inf) -> float:
        """Microseconds of a launch; inf where it fails or takes longer than `worst`."""
        run = partial(launch_time, partial(self.operands.launch, choice), self.launches, repeats, worst)
        return float(attempt(run) or math.inf)

    def row(self, bandwidth: float) -> dict[str, Any]:
        """The default and the best of the three best, timed once more and compared."""
        case, want = self.operands.case, self.operands.result(self.default)
        again: dict[Choice, float] = {}
        wrong = []
        for choice in dict.fromkeys([self.default, *sorted(self.times, key=self.times.__getitem__)[:3]]):
            if not float((self.operands.result(choice) - want).abs().max()) < TOLERANCE:
                wrong.append(asdict(choice))
                continue
            again[choice] = self.time(choice, 9)
        best = min(again, key=again.__getitem__, default=self.default)
        us = again.get(best, math.nan)
        rates = {"GB/s": case.read_bytes / us / 1e3, "of_read": case.read_bytes / us * 1e6 / bandwidth}
        rates |= {"default_of_read": case.read_bytes / again.get(self.default, math.nan) * 1e6 / bandwidth}
        times = [{**asdict(c), "us": t} for c, t in sorted(self.times.items(), key=lambda item: item[1])]
        return {
            "case": case.name, "default": asdict(self.default), "default_us": again.get(self.default, math.nan),
            "best": asdict(best), "best_us": us, **rates, "TFLOP/s": case.operations / us / 1e6, "wrong": wrong,
            "tried": len(self.times), "left": len(self.waiting), "timed": times,
        }  # fmt: skip


def start(case: Case, device: torch.device, work: Sequence[Choice]) -> Race:
    """The tensors of a case; the first choice is the default."""
    copies = min(32, max(2, -(-COPY_BYTES // case.read_bytes))) if device.type == "cuda" else 1
    return Race(Operands.random(case, device, copies), work[0], list(work))


def run(races: Sequence[Race], ready: set[Any], deadline: float, say: Callable[[str], None]) -> None:
    """The cases take turns until all is timed or the time is over."""
    while any(race.waiting for race in races):
        for race in races:
            while race.waiting:
                choice = race.waiting.pop(0)
                if not ready or choice.tiles is None or kernel(race.operands.case, choice) in ready:
                    break  # else: it did not compile
            else:
                continue
            if time.monotonic() > deadline:
                say("the time is over")
                return
            us = race.time(choice, 3, WORST * min(race.times.values(), default=math.inf))
            if us < math.inf:
                race.times[choice] = us
    say("all is timed")


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    best = row["best"]
    tiles = "/".join(map(str, (best["tiles"] or {}).values())) or f"mixed={best['mixed']}"
    parts = [
        f"{row['case']:52} default {row['default_us']:8.1f} us ({row['default_of_read']:5.3f})",
        f"best {row['best_us']:8.1f} us {row['GB/s']:5.0f} GB/s ({row['of_read']:5.3f}) {row['TFLOP/s']:4.0f} TF/s",
        f"{tiles} splits {best['num_splits']}{' pdl' if best['pdl'] else ''}",
        f"{row['tried']} tried" + (f"  WRONG: {row['wrong']}" if row["wrong"] else ""),
    ]
    return "  ".join(parts)


def main() -> None:
    """Sweep every case and write attention_sweep.json."""
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="when to begin no more timings")
    parser.add_argument("--compile-seconds", type=float, default=60.0, help="limit of compiling, a part of --seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU under TRITON_INTERPRET=1")
    options = parser.parse_args()
    if options.tiny and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--tiny needs TRITON_INTERPRET=1")
    deadline = time.monotonic() + options.seconds
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    bandwidth = 1e9 if options.tiny else limits.read_bandwidth()
    CONSOLE.print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    work = {
        case: choices(case, sm_count(device), pdl=has_pdl(device), tiny=options.tiny) for case in cases(options.tiny)
    }
    turns = itertools.chain(
        *itertools.zip_longest(*([(case, choice) for choice in some] for case, some in work.items()))
    )
    jobs = [job for job in turns if job is not None and job[1].tiles is not None]
    ready = set() if options.tiny else compiled(jobs, device, options.compile_seconds)
    races = [start(case, device, some) for case, some in work.items()]
    rows: list[dict[str, Any]] = []
    try:
        run(races, ready, deadline, CONSOLE.print)
    finally:
        rows += [row for race in races if (row := attempt(partial(race.row, bandwidth))) is not None]
        notes = {"device": limits.device_name(device), "torch": torch.__version__, "triton": triton.__version__}
        options.out.mkdir(parents=True, exist_ok=True)
        content = {**notes, "read_bandwidth": bandwidth, "rows": rows}
        (options.out / "attention_sweep.json").write_text(json.dumps(content, indent=1) + "\n")
        for row in rows:
            CONSOLE.print(line(row), soft_wrap=True)


if __name__ == "__main__":
    main()
