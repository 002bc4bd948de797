"""The cases of `scripts/bench kernels`: a generator of cases for each kind of kernel, at the sizes of a model.

A case has several inputs, used in turn so that the L2 cache holds none of them; the ways that are always timed; and the
candidates of a sweep, which are other tiles whose results are checked.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.report import DEVICE
from outpace.bench.shapes import SHAPES, rank_shape
from outpace.kernels.activation import gated_act_triton
from outpace.kernels.attention import paged_attention
from outpace.kernels.attention_decode import DecodeTiles, paged_attention_decode
from outpace.kernels.attention_prefill import PrefillTiles, paged_attention_prefill
from outpace.kernels.decode_plan import MIN_PART, DecodePlans, make_plan, part_budget
from outpace.kernels.launch_options import sm_count
from outpace.kernels.layer_norm import layer_norm_triton
from outpace.kernels.packed import Packed
from outpace.kernels.rms_norm import rms_norm_triton
from outpace.kernels.rotary import rope_and_cache_triton

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
COLD = 256 << 20  # bytes of all inputs together: five times the L2 cache
SHARED = 220 << 10  # bytes of shared memory of an SM
TOLERANCE = 0.02  # allowed error relative to the largest result, in 16 bits
ROUNDED = 0.1  # the same with quantized activations
PAGE = 64
KINDS: Mapping[str, tuple[str, int | None, int]] = {
    "int8": ("int8", None, 1), "int4": ("int4", 128, 1), "fp8": ("fp8", None, 1), "fp8-blocks": ("fp8", 128, 128),
}  # fmt: skip
"""Kind, group (None: a whole row) and block of each scheme of quantized weights."""

Run = Callable[..., Any]


class Way(NamedTuple):
    """A kernel with certain tiles; it is called with the inputs of a case in turn."""

    name: str
    run: Run
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Case:
    """One kernel at one size, and the least work for it."""

    kernel: str
    what: str
    inputs: Sequence[tuple[Any, ...]]
    ways: Sequence[Way]
    amount: float
    """Bytes or operations of a call."""
    limit: str
    """The rate that limits it: read, copy or product."""
    want: Callable[[], Tensor] | None = None
    """The right result for the first inputs; None: nothing is checked."""
    candidates: Iterable[Way] = ()


class Work(NamedTuple):
    """The requested sizes."""

    rows: Sequence[int]
    """Tokens of a product."""
    kinds: Sequence[str]
    """Kinds of weights; none: 16 bits."""


@dataclass(frozen=True)
class Model:
    """The sizes that kernels see, of a shape or (NAME:RANKS) of one of its ranks."""

    name: str
    shape: Mapping[str, Any]

    @classmethod
    def of(cls, text: str) -> "Model":
        """The type of an option."""
        name, _, ranks = text.partition(":")
        if name not in SHAPES or (ranks and not ranks.isdigit()):
            raise argparse.ArgumentTypeError(f"{text} is not NAME or NAME:RANKS with a name of {', '.join(SHAPES)}")
        return cls(text, rank_shape(name, int(ranks)) if ranks else SHAPES[name])

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return int(self.shape["hidden_size"])

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads and their size."""
        return self.shape["num_attention_heads"], self.shape["num_key_value_heads"], self.shape["head_dim"]

    @property
    def experts(self) -> int:
        """Experts of a layer; 0: it has one MLP."""
        return max(self.shape.get(key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts"))

    @property
    def inner(self) -> int:
        """Width of an MLP or an expert."""
        return int(self.shape.get("moe_intermediate_size", self.shape["intermediate_size"]))

    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and depth of each linear layer. The weight of gate_up has twice as many rows as outputs."""
        heads, kv_heads, dim = self.heads
        found = {"qkv": ((heads + 2 * kv_heads) * dim, self.hidden), "o": (self.hidden, heads * dim)}
        if not self.experts:
            found |= {"gate_up": (self.inner, self.hidden), "down": (self.hidden, self.inner)}
        return {**found, "head": (self.shape["vocab_size"], self.hidden)}


def randn(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def copies(size: float) -> int:
    """Number of inputs of this many bytes that are used in turn."""
    return max(2, int(COLD // size)) if DEVICE.type == "cuda" else 1


def random_weight(kind: str, shape: tuple[int, int], experts: int | None = None) -> Any:
    """A weight, or a stack of experts, whose products are about as large as a model's."""
    if kind == "none":
        return randn(*(() if experts is None else (experts,)), *shape) / shape[1] ** 0.5
    name, group, block = KINDS[kind]
    kept = torch.float16 if name == "int4" else torch.float32
    weight = Packed.empty(name, shape, group or shape[1], block, experts=experts, scale_dtype=kept, device=DEVICE)
    if name == "fp8":
        weight.values.copy_(torch.randn(weight.values.shape, device=DEVICE) * 60)
    else:
        low, high = (-127, 128) if name == "int8" else (0, 256)
        weight.values.copy_(torch.randint(low, high, weight.values.shape, device=DEVICE))
    size = {"int8": 73.0, "int4": 4.6, "fp8": 60.0}[name] * shape[1] ** 0.5
    weight.scale.uniform_(0.5 / size, 1.5 / size)
    return weight


def streaming(model: Model, work: Work) -> Iterator[Case]:
    """Norms, activation and rotary of a large step, which write about as much as they read."""
    rows = 8192 if DEVICE.type == "cuda" else 64
    weight, bias = randn(model.hidden), randn(model.hidden)
    x = [(randn(rows, model.hidden),) for _ in range(4)]
    norms = {"rms_norm": lambda x: rms_norm_triton(x, weight, 1e-5, out=x)}
    norms["layer_norm"] = lambda x: layer_norm_triton(x, weight, bias, 1e-5, out=x)
    for name, run in norms.items():
        yield Case(name, f"{rows} x {model.hidden}", x, [Way("triton", run)], 4.0 * rows * model.hidden, "copy")
    gates = [(randn(rows, 2 * model.inner),) for _ in range(2)]
    act = Way("triton", lambda x: gated_act_triton(x, "silu"))
    yield Case("gated_act", f"{rows} x {model.inner}", gates, [act], 6.0 * rows * model.inner, "copy")
    yield _rotary(model, rows)


def _rotary(model: Model, rows: int) -> Case:
    """Rotation of q and k, and the write of k and v to pages."""
    heads, kv_heads, dim = model.heads
    cos, sin = (torch.randn(rows, dim // 2, device=DEVICE) for _ in range(2))
    positions = torch.arange(rows, device=DEVICE)
    pages = [randn(rows // PAGE, PAGE, kv_heads, dim) for _ in range(2)]
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "rotary_dim": dim}
    inputs = [(randn(rows, (heads + 2 * kv_heads) * dim),) for _ in range(4)]
    turn = Way("triton", lambda x: rope_and_cache_triton(x, cos, sin, positions, positions, *pages, **sizes))
    moved = 2.0 * rows * dim * (2 * (heads + kv_heads) + 3 * kv_heads) + rows * dim * 4.0
    return Case("rope_and_cache", f"{rows} tokens, {heads}/{kv_heads} x {dim}", inputs, [turn], moved, "copy")


def attention(model: Model, work: Work) -> Iterator[Case]:
    """Decode over many keys, uneven batches included, and a prefill."""
    if DEVICE.type == "cpu":
        yield attend(model.heads, [(1, 150), (1, 20)])
        yield attend(model.heads, [(64, 80)])
        return
    for batch, length in ((1, 65536), (8, 8192), (64, 1024), (64, 4096), (256, 700)):
        yield attend(model.heads, [(1, length)] * batch)
    yield attend(model.heads, [*([(1, 32768)] * 8), *([(1, 300)] * 200), *([(0, 0)] * 48)])
    yield attend(model.heads, [(4096, 4096)])
    yield attend(model.heads, [(512, 1536)] * 4)


def attend(heads: tuple[int, int, int], seqs: Sequence[tuple[int, int]]) -> Case:
    """A batch of sequences, given as (queries, keys), with pages in random order."""
    queries, kv_heads, dim = heads
    lens = [keys for _, keys in seqs]
    counts = [-(-keys // PAGE) for keys in lens]
    table = torch.zeros(len(seqs), max(counts), dtype=torch.int32)
    for row, ids in zip(table, torch.randperm(sum(counts)).split(counts), strict=True):
        row[: len(ids)] = ids
    ints = [torch.tensor(lens), torch.tensor([0, *(each for each, _ in seqs)]).cumsum(0)]
    pages_of, seq_lens, cu_q = (each.to(DEVICE, torch.int32) for each in (table, *ints))
    read = 2 * DTYPE.itemsize * kv_heads * dim * sum(lens)
    pages = sum(counts), PAGE, kv_heads, dim
    inputs = [(randn(*pages), randn(*pages)) for _ in range(copies(read))]
    decodes = max(each for each, _ in seqs) == 1
    q = randn(len(seqs) if decodes else sum(each for each, _ in seqs), queries, dim)
    most, plans = max(each for each, _ in seqs), DecodePlans()
    options: dict[str, Any] = {"scale": dim**-0.5}

    def run(keys: Tensor, values: Tensor) -> Tensor:
        return paged_attention(
            q, keys, values, pages_of, seq_lens, cu_q, most, max_len=max(lens), plans=plans, **options
        )

    def other(keys: Tensor, values: Tensor, **tiles: Any) -> Tensor:
        if decodes:
            return paged_attention_decode(
                q, keys, values, pages_of, seq_lens, cu_q, max_len=max(lens), **options, **tiles
            )
        return paged_attention_prefill(q, keys, values, pages_of, seq_lens, cu_q, most, **options, **tiles)

    kinds = dict.fromkeys(each for each in seqs if each[0])
    what = " + ".join(f"{seqs.count(each)} x {each[0]}/{each[1]}" for each in kinds)
    what = f"{what} keys, {queries}/{kv_heads} x {dim}"
    ways = [Way("own", run)]
    if decodes:
        found = _decode_tiles(other, heads, [seq_lens, cu_q], max(lens))
        return Case("attention decode", what, inputs, ways, read, "read", partial(run, *inputs[0]), found)
    seen = sum(new * keys - new * (new - 1) // 2 for new, keys in seqs)
    found = _prefill_tiles(other, dim)
    amount = 4.0 * queries * dim * seen
    return Case("attention prefill", what, inputs, ways, amount, "product", partial(run, *inputs[0]), found)


def _decode_tiles(run: Run, heads: tuple[int, int, int], lists: Sequence[Any], longest: int) -> Iterator[Way]:
    """Tiles, each with half as many, as many and twice as many parts as usual."""
    _, kv_heads, dim = heads
    budget = part_budget(len(lists[0]), kv_heads, sm_count(DEVICE))
    for share in (1.0, 0.5, 2.0):
        parts = max(1, round(share * budget))
        most = min(100, -(-longest // MIN_PART))
        plan = make_plan(lists[0], lists[1], kv_heads, most=most, budget=parts)
        for n, warps, stages in product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4)):
            if n * 4 * dim * (stages - 1) <= SHARED:
                tiles = DecodeTiles(n, warps, stages)
                yield Way(f"{tiles}, {parts} parts", partial(run, plan=plan, tiles=tiles))


def _prefill_tiles(run: Run, dim: int) -> Iterator[Way]:
    for m, n, warps, stages in product((64, 128), (32, 64, 128, 256), (4, 8), (2, 3, 4)):
        if n * 4 * dim * (stages - 1) <= SHARED:
            tiles = PrefillTiles(m, n, warps, stages)
            yield Way(str(tiles), partial(run, tiles=tiles))
