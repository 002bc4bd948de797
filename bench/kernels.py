"""Every kernel at the shapes of dense models and mixtures of experts, as a fraction of what the device can do.

Kernels that move bytes stand beside the read bandwidth (or that of a copy, if they write as much as they read), those
that multiply beside the rate of a large bf16 product. Each is timed in a CUDA graph of several launches over different
data, so that neither launch gaps nor the L2 cache are measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import experts, report
from outpace.kernels import limits
from outpace.kernels.activation import gated_act_triton
from outpace.kernels.attention import paged_attention
from outpace.kernels.gemv import gemv_triton
from outpace.kernels.layer_norm import layer_norm_triton
from outpace.kernels.rms_norm import rms_norm_triton
from outpace.kernels.rotary import rope_and_cache_triton

DTYPE = torch.bfloat16
ROWS = 8192
COPIES = 4
LAUNCHES = 24  # in a graph, at least


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that kernels see."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (
    Shape("1b", 2048, 8192, 32, 8, 64),
    Shape("8b", 4096, 14336, 32, 8, 128),
    Shape("70b", 8192, 28672, 64, 8, 128),
)
NAMES = (*(shape.name for shape in SHAPES), *(model.name for model in experts.MODELS))


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: what to run, and how many bytes or operations that is."""

    kernel: str
    what: str
    runs: Sequence[Callable[[], object]]
    amount: float
    limit: str


def randn(*shape: int) -> torch.Tensor:
    """Random data of the models' dtype."""
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def streaming(shape: Shape) -> Iterator[Case]:
    """Norms, activation and rotary: as much is written as read."""
    weight, bias = randn(shape.hidden), randn(shape.hidden)
    rows = [(randn(ROWS, shape.hidden), randn(ROWS, shape.hidden)) for _ in range(COPIES)]
    moved = 4.0 * ROWS * shape.hidden * 2
    norms = [partial(rms_norm_triton, x, weight, 1e-5, residual=r, residual_out=r, out=x) for x, r in rows]
    yield Case("rms_norm", f"{ROWS} x {shape.hidden} + residual", norms, moved, "copy")
    layers = [partial(layer_norm_triton, x, weight, bias, 1e-5, residual=r, residual_out=r, out=x) for x, r in rows]
    yield Case("layer_norm", f"{ROWS} x {shape.hidden} + residual", layers, moved, "copy")
    gates = [randn(ROWS, 2 * shape.inner) for _ in range(2)]
    acts = [partial(gated_act_triton, x, "silu") for x in gates]
    yield Case("gated_act", f"{ROWS} x {shape.inner}", acts, 3.0 * ROWS * shape.inner * 2, "copy")
    yield rotary(shape)


def rotary(shape: Shape) -> Case:
    """Rotation of q and k, and the write of k and v to pages."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    cos, sin = (torch.randn(ROWS, shape.head_dim // 2, device="cuda") for _ in range(2))
    positions = torch.arange(ROWS, device="cuda")
    pages = [randn(ROWS // 64, 64, shape.kv_heads, shape.head_dim) for _ in range(2)]
    sizes: dict[str, Any] = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    turn = partial(rope_and_cache_triton, rotary_dim=shape.head_dim, **sizes)
    runs = [
        partial(turn, x, cos, sin, positions, positions, *pages) for x in [randn(ROWS, width) for _ in range(COPIES)]
    ]
    turned = shape.heads + shape.kv_heads
    moved = 2.0 * ROWS * shape.head_dim * (2 * turned + 3 * shape.kv_heads) + ROWS * shape.head_dim * 4.0
    return Case(
        "rope_and_cache", f"{ROWS} tokens, {shape.heads}/{shape.kv_heads} x {shape.head_dim}", runs, moved, "copy"
    )


def attention(shape: Shape) -> Iterator[Case]:
    """Decode over at least 64k keys; a prefill of 4k tokens."""
    for batch, length in ((1, 65536), (64, 1024), (64, 4096)):
        yield attend(shape, "attention decode", batch, 1, length)
    yield attend(shape, "attention prefill", 1, 4096, 4096)


def attend(shape: Shape, kernel: str, batch: int, new: int, length: int) -> Case:
    """Attention of `new` tokens of each sequence over its pages."""
    per_sequence = length // 64
    keys, values = (randn(batch * per_sequence, 64, shape.kv_heads, shape.head_dim) for _ in range(2))
    table = torch.randperm(batch * per_sequence, device="cuda").to(torch.int32).view(batch, per_sequence)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    cu_q = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device="cuda")
    q = randn(batch * new, shape.heads, shape.head_dim)

    def run() -> torch.Tensor:
        return paged_attention(q, keys, values, table, lens, cu_q, new, scale=shape.head_dim**-0.5, max_len=length)

    what = f"{batch} x {length} keys, {shape.heads}/{shape.kv_heads} x {shape.head_dim}"
    if new == 1:
        moved = 4.0 * batch * length * shape.kv_heads * shape.head_dim
        return Case(kernel, what, [run], moved, "read")
    operations = 4.0 * batch * shape.heads * shape.head_dim * (length * (length + 1) / 2)
    return Case(kernel, what, [run], operations, "product")


def products(shape: Shape) -> Iterator[Case]:
    """The linears of one decode step, with what is fused into each."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    x, inner = randn(1, shape.hidden), randn(1, shape.inner)
    heads, norm = randn(1, shape.heads * shape.head_dim), randn(shape.hidden)
    fused: tuple[tuple[str, torch.Tensor, int, dict[str, Any]], ...] = (
        ("qkv + norm", x, qkv, {"norm_weight": norm, "eps": 1e-5}),
        ("out + residual", heads, shape.hidden, {"add": x}),
        ("gate_up + norm + silu", x, 2 * shape.inner, {"norm_weight": norm, "eps": 1e-5, "activation": "silu"}),
        ("down + residual", inner, shape.hidden, {"add": x}),
    )
    for what, given, outputs, options in fused:
        size = outputs * given.shape[1] * 2
        weights = [randn(outputs, given.shape[1]) for _ in range(max(2, (256 << 20) // size))]
        runs = [partial(gemv_triton, given, weight, **options) for weight in weights]
        yield Case("gemv", f"{what} {outputs} x {given.shape[1]}", runs, float(size), "read")


def graph_ms(runs: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of one of the runs, from a graph of many: the start of a graph takes as long as a short kernel."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    turns = max(2, LAUNCHES // len(runs))
    with torch.cuda.graph(graph):
        for run in [*runs] * turns:
            run()
    return limits.gpu_ms(graph.replay, repeats=20) / (turns * len(runs))


def timed(model: str, case: Case | experts.Row, rates: Mapping[str, float]) -> dict[str, Any]:
    """A row of the table."""
    ms = graph_ms(case.runs)
    rate = case.amount / (ms * 1e-3)
    return {
        "model": model, "kernel": case.kernel, "what": case.what, "us": ms * 1e3,
        "T/s": rate / 1e12, "limit": case.limit, "of limit": rate / rates[case.limit],
    }  # fmt: skip


def measure(folder: Path, models: Sequence[str] = NAMES) -> None:
    """Measure every kernel at the shapes of these models and write the table."""
    rates = {"read": limits.read_bandwidth(), "copy": limits.copy_bandwidth(), "product": limits.matmul_flops()}
    rows = []
    for shape in [shape for shape in SHAPES if shape.name in models]:
        for cases in (streaming, attention, products):
            rows += [timed(shape.name, case, rates) for case in cases(shape)]
            torch.cuda.empty_cache()
    for model in [model for model in experts.MODELS if model.name in models]:
        rows += [timed(model.name, row, rates) for row in experts.cases(model, rates)]
        torch.cuda.empty_cache()
    notes = {f"{name} T/s": rate / 1e12 for name, rate in rates.items()}
    report.write("kernels", limits.device_name(torch.device("cuda")), rows, notes, folder)


def main() -> None:
    """Measure from the command line."""
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="MODEL", help=", ".join(NAMES))
    args = parser.parse_args()
    measure(args.out, args.models)


if __name__ == "__main__":
    main()
