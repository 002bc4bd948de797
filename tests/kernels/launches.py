"""Launches of every kernel at the shapes of real models, on the meta device: nothing is computed, all is compiled."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.activation import bias_act_triton, gated_act_triton
from outpace.kernels.attention_decode import paged_attention_decode
from outpace.kernels.attention_prefill import paged_attention_prefill
from outpace.kernels.block_copy import Pieces, gather_blocks_triton, scatter_blocks_triton
from outpace.kernels.draw import Drawing, draw_triton
from outpace.kernels.embedding import embed_triton
from outpace.kernels.experts_few import experts_few
from outpace.kernels.experts_few_packed import experts_few_packed
from outpace.kernels.experts_many import experts_many, fixed_tiles, tiles_for
from outpace.kernels.few_rows import few_rows_triton
from outpace.kernels.gemv import gemv_triton
from outpace.kernels.layer_norm import layer_norm_triton
from outpace.kernels.likeliest import write_likeliest_triton
from outpace.kernels.matmul import matmul_invariant_triton
from outpace.kernels.packed import Packed
from outpace.kernels.packed_gemv import packed_gemv_triton
from outpace.kernels.packed_matmul import dequantize_triton, invariant_tiles, packed_matmul_triton
from outpace.kernels.quantize import empty_rows, quantize_rows_triton
from outpace.kernels.ragged import ragged_inputs_triton
from outpace.kernels.rms_norm import rms_norm_triton
from outpace.kernels.rotary import rope_and_cache_triton
from outpace.kernels.routing import Routing, route_triton
from outpace.kernels.scaled_linear import scaled_matmul_triton

BF16, FP16, FP32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def routing() -> None:
    """Each score, with and without groups, bias, padding and counts."""
    for routing, experts, dtype in (
        (Routing(top_k=8, renormalise=True), 128, BF16),
        (Routing(top_k=4, score="chosen"), 32, FP16),
        (Routing(top_k=2, score="mixer", jitter=0.01), 16, FP32),
        (Routing(top_k=6, groups=8, kept_groups=3, scale=16.0), 160, FP32),
    ):
        route_triton(meta(33, experts, dtype=dtype), routing)
    three = Routing(
        top_k=8, score="sigmoid", groups=8, kept_groups=4, group_score="two", renormalise=True, epsilon=1e-20
    )
    bias, slots, counts = meta(256, dtype=FP32), meta(33, dtype=INT64), meta(256, dtype=INT32)
    route_triton(meta(33, 256, dtype=FP32), three, bias, slots=slots, counts=counts)


def moe(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype = BF16, **options: Any) -> Any:
    """The arguments of experts."""
    top_k, experts, hidden, inner = shape
    rows = inner * (2 if options.get("gated", True) else 1)
    if options.get("limit"):
        options |= {"gate_up_bias": meta(experts, rows), "down_bias": meta(experts, hidden)}
    weights, chosen = meta(tokens, top_k, dtype=FP32), meta(tokens, top_k, dtype=INT32)
    stacks = meta(experts, rows, hidden, dtype=dtype), meta(experts, hidden, inner, dtype=dtype)
    return (meta(tokens, hidden, dtype=dtype), *stacks, weights, chosen), {"act": "silu", **options}


MIXTRAL, QWEN, GPT_OSS, ODD = (2, 8, 4096, 14336), (8, 128, 2048, 768), (4, 32, 2880, 2880), (3, 5, 300, 77)
CLAMPED: dict[str, Any] = {"limit": 7.0, "alpha": 1.702}


def few() -> None:
    """The kernels of few tokens: three models, other dtypes, odd widths, no gates."""
    calls = (moe(1, MIXTRAL), moe(1, QWEN), moe(2, GPT_OSS, **CLAMPED), moe(3, ODD, FP32, gated=False))
    for args, options in calls:
        experts_few(*args, **options)
        experts_few(*args, **options, add=args[0], out=args[0])


def many() -> None:
    """The kernels of many tokens with the tiles of every number of rows."""
    for (args, options), tiles in (
        (moe(16, QWEN), None),
        (moe(512, QWEN), tiles_for(32, 1, BF16)),
        (moe(8192, MIXTRAL), None),
        (moe(32, GPT_OSS, **CLAMPED), fixed_tiles(BF16)),
        (moe(100, ODD, FP32, gated=False), None),
    ):
        experts_many(*args, **options, tiles=tiles)
        experts_many(*args, **options, tiles=tiles, add=args[0], out=args[0])


def packed_experts() -> None:
    """The kernels of few and of many tokens with quantized experts."""
    for tokens, kind, group, block, zero in (
        (16, "int4", 128, 1, False),
        (64, "int8", 2048, 1, True),
        (512, "fp8", 128, 128, False),
        (8192, "fp8", 2048, 1, False),
        (8192, "int8", 2048, 1, False),
        (8192, "int4", 32, 1, True),
    ):
        (x, _, _, *routed), options = moe(tokens, QWEN)
        _, experts, hidden, inner = QWEN
        gate_up, down = [
            Packed.empty(kind, shape, min(group, shape[1]), block, experts=experts, with_zero=zero, device="meta")
            for shape in ((2 * inner, hidden), (hidden, inner))
        ]
        experts_many(x, gate_up, down, *routed, **options)
        if not zero and kind != "int4":
            experts_many(x, gate_up, down, *routed, **options, rows=kind)
        experts_few_packed(x, gate_up, down, *routed, **options)


def products() -> None:
    """Linear layers of few rows, and those that do not depend on the batch."""
    x, norm = meta(1, 4096), meta(4096)
    gemv_triton(x, meta(28672, 4096), norm_weight=norm, eps=1e-5, activation="silu")
    gemv_triton(x, meta(16384, 4096), norm_weight=norm, norm_bias=norm, centered=True, activation="gelu", gated=False)
    counts = meta(1024, dtype=INT32)
    write_likeliest_triton(meta(8, 128256), meta(9, 100, dtype=INT32), counts[:8], counts[:8])
    few_rows_triton(meta(8, 4096), meta(28672, 4096), norm_weight=norm, eps=1e-5, activation="silu")
    few_rows_triton(meta(8, 3584), meta(4608, 3584), norm_weight=meta(3584), bias=meta(4608), counts=counts)
    few_rows_triton(meta(2, 14336), meta(4096, 14336), add=meta(2, 4096), counts=counts)
    for rows, (_, experts, hidden, _) in itertools.product((1, 2), (MIXTRAL, QWEN, GPT_OSS)):  # routers
        gemv_triton(meta(rows, hidden), meta(experts, hidden), bias=meta(experts))
    for rows in (1, 200):
        matmul_invariant_triton(meta(rows, 4096), meta(6144, 4096))


def packed(kind: str, rows: int, depth: int, group: int, block: int = 1, zero: bool = False) -> Packed:
    """A quantized weight; groups have scales in fp16."""
    dtype = FP32 if group >= depth else FP16
    return Packed.empty(kind, (rows, depth), group, block, scale_dtype=dtype, with_zero=zero, device="meta")


def packed_few() -> None:
    """Few rows times quantized weights: one scale a row, groups, blocks, zeros, odd widths."""
    x, norm = meta(1, 4096), meta(4096)
    packed_gemv_triton(x, packed("int8", 28672, 4096, 4096), norm_weight=norm, eps=1e-5, activation="silu")
    packed_gemv_triton(x, packed("int4", 28672, 4096, 128), norm_weight=norm, eps=1e-5, activation="silu")
    packed_gemv_triton(x, packed("int4", 6144, 4096, 32, zero=True), norm_weight=norm, eps=1e-5)
    packed_gemv_triton(x, packed("int8", 6144, 4096, 16, zero=True), norm_weight=norm, eps=1e-5)  # GGUF's Q6_K, Q4_K
    packed_gemv_triton(meta(2, 4096), packed("fp8", 4096, 4096, 128, 128), bias=norm, add=meta(2, 4096))
    packed_gemv_triton(meta(4, 577, dtype=FP16), packed("int4", 64, 577, 64))
    packed_gemv_triton(meta(16, 4096), packed("int8", 4096, 4096, 4096, zero=True))


def packed_many() -> None:
    """Many rows times quantized weights: each kind, with scales by row, by step and by weight."""
    for rows, weight in (
        (8, packed("int8", 4096, 4096, 4096)),
        (16, packed("int4", 4096, 4096, 128)),
        (64, packed("int4", 28672, 4096, 64, zero=True)),
        (128, packed("fp8", 6144, 4096, 4096)),
        (256, packed("fp8", 6144, 4096, 128, 128)),
        (256, packed("int8", 4096, 4096, 4096, zero=True)),
        (33, packed("int4", 4096, 4096, 16)),
        (256, packed("int8", 4096, 4096, 16, zero=True)),
    ):
        packed_matmul_triton(meta(rows, 4096), weight)
    packed_matmul_triton(meta(100, 577, dtype=FP32), packed("int4", 64, 577, 64))
    weight = packed("int4", 4096, 14336, 128)
    packed_matmul_triton(meta(3, 14336), weight, tiles=invariant_tiles(*weight.shape))
    dequantize_triton(weight, BF16)


def quantized_rows() -> None:
    """Rows quantized by themselves, in norms and in activations, and products with them."""
    device = torch.device("meta")
    x, weight = meta(33, 4096), meta(4096)
    for kind in ("int8", "fp8"):
        quantize_rows_triton(meta(33, 14336), kind)
        values, scales = empty_rows(33, 4096, kind, device)
        rms_norm_triton(x, weight, 1e-5, add=x, out=values, scales=scales)
        bias_act_triton(x, weight, "gelu_tanh", out=values, scales=scales)
        inner = empty_rows(33, 14336, kind, device)
        gated_act_triton(meta(33, 28672), "silu", out=inner[0], scales=inner[1])
        for count, depth, group, block in (
            (1, 4096, 4096, 1),
            (64, 4096, 128, 128),
            (256, 4096, 4096, 1),
            (9, 577, 577, 1),
        ):
            values, scales = empty_rows(count, depth, kind, device)
            scaled_matmul_triton(values, scales, packed(kind, 6144, depth, group, block), dtype=BF16)


def rows() -> None:
    """Norms, activations and what else takes rows one by one; over few rows they overlap the previous kernel."""
    for count in (8, 33):
        x, weight = meta(count, 4096), meta(4096)
        rms_norm_triton(x, weight, 1e-5, add=x, out=x)
        layer_norm_triton(x, weight, weight, 1e-5)
        gated_act_triton(x, "silu")
        bias_act_triton(x, weight, "gelu_tanh")
    for word, longest in ((8, 16384), (4, 96), (1, 5)):
        pieces = Pieces((x, x), meta(4, 2, dtype=INT64), word, longest, 1 << 10)
        gather_blocks_triton(pieces, meta(3, dtype=INT64), meta(3, 1 << 10, dtype=torch.uint8))
        scatter_blocks_triton(pieces, meta(3, dtype=INT64), meta(3, 1 << 10, dtype=torch.uint8))
    embed_triton(meta(33, dtype=INT64), meta(1000, 4096))


def sampling() -> None:
    """The draw of a token, and the inputs of a step."""
    floats, ints = meta(8, dtype=FP32), meta(8, dtype=INT64)
    draw_triton(meta(8, 128256), Drawing(floats, ints, floats, floats, ints, ints))
    table, row = meta(8, 64, dtype=INT32), meta(3, dtype=INT32)
    ragged_inputs_triton(meta(8, 4096, dtype=INT32), table, row, row, meta(4, dtype=INT32), 16, 64)


def attention() -> None:
    """Rotation, and attention over pages: decode in one part and in several, and prompts."""
    heads: dict[str, int] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rotary_dim": 128}
    k, v = meta(100, 64, 8, 128), meta(100, 64, 8, 128)
    for count in (8, 33):
        cos, at = meta(4096, 64, dtype=FP32), meta(count, dtype=INT64)
        rope_and_cache_triton(meta(count, 48 * 128), cos, cos, at, at, k, v, **heads)  # type: ignore[arg-type]
    table, lens, cu_q = meta(3, 8, dtype=INT32), meta(3, dtype=INT32), meta(4, dtype=INT32)
    for splits in (1, 4):
        paged_attention_decode(meta(3, 32, 128), k, v, table, lens, cu_q, scale=0.1, num_splits=splits)
    for few, many in (((32, 8, 128), (28, 4, 128)), ((32, 8, 64), (8, 4, 256))):
        planned_decode(1, *few)
        planned_decode(256, *many)
    planned_decode(256, 32, 8, 128, mixed=True, fold=False)
    planned_decode(1, 71, 1, 64)
    paged_attention_prefill(meta(300, 32, 128), k, v, table, lens, cu_q, 100, scale=0.1)


def planned_decode(batch: int, heads: int, kv_heads: int, dim: int, **options: bool) -> None:
    """Decodes that are planned, with parts that the kernel puts together itself, or another one does."""
    pages, lens, cu_q = meta(100, 64, kv_heads, dim), meta(batch, dtype=INT32), meta(batch + 1, dtype=INT32)
    q, table, rest = meta(batch, heads, dim), meta(batch, 80, dtype=INT32), dict[str, Any](options)
    paged_attention_decode(q, pages, pages, table, lens, cu_q, scale=0.1, **rest)


def quantized_attention() -> None:
    """The same over pages of int8 and fp8: heads of 64 to 256, groups, fp16, and what scores go through."""
    table, lens, cu_q = meta(3, 8, dtype=INT32), meta(3, dtype=INT32), meta(4, dtype=INT32)
    at, slopes, all_options = meta(33, dtype=INT64), meta(32, dtype=FP32), {"window": 500, "softcap": 30.0}
    for pages, dtype, kv_heads, dim, options in (
        (INT8, BF16, 8, 128, {}),
        (FP8, BF16, 8, 128, {}),
        (INT8, FP16, 4, 64, {"alibi_slopes": slopes, "sinks": slopes, **all_options}),
        (FP8, FP16, 32, 96, {"sinks": slopes}),
        (INT8, BF16, 8, 256, all_options),
        (FP8, BF16, 4, 256, {}),
    ):
        k, v = (meta(100, 64, kv_heads, dim, dtype=pages) for _ in range(2))
        scales = meta(100, 2, kv_heads, 64, dtype=FP32)
        cos, qkv = meta(4096, dim // 4, dtype=FP32), meta(33, (32 + 2 * kv_heads) * dim, dtype=dtype)
        heads: dict[str, int] = {"num_heads": 32, "num_kv_heads": kv_heads, "head_dim": dim, "rotary_dim": dim // 2}
        rope_and_cache_triton(qkv, cos, cos, at, at, k, v, scales=scales, **heads)  # type: ignore[arg-type]
        rest: dict[str, Any] = {"scale": 0.1, "scales": scales, **options}
        for splits in (0, 1, 4):
            paged_attention_decode(meta(3, 32, dim, dtype=dtype), k, v, table, lens, cu_q, num_splits=splits, **rest)
        for invariant in (False, True):
            q = meta(300, 32, dim, dtype=dtype)
            paged_attention_prefill(q, k, v, table, lens, cu_q, 100, invariant=invariant, **rest)


ALL: tuple[Callable[[], None], ...] = (
    routing,
    few,
    many,
    packed_experts,
    products,
    packed_few,
    packed_many,
    quantized_rows,
    rows,
    sampling,
    attention,
    quantized_attention,
)
