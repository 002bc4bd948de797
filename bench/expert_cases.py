"""The cases of `scripts/bench kernels` for routing and experts."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from bench.kernel_cases import KINDS, ROUNDED, SHARED, Case, Model, Run, Way, Work, randn, random_weight
from outpace.kernels.experts import experts_grouped, experts_in_turn, experts_invariant_triton
from outpace.kernels.experts_few import down_config, experts_few, up_config
from outpace.kernels.experts_few_packed import experts_few_packed
from outpace.kernels.experts_many import Tiles, experts_many
from outpace.kernels.packed_gemv import fitting_depth
from outpace.kernels.routing import Routing, route_torch, route_triton

FEW_PAIRS = 256  # most pairs of token and expert for the kernels of few tokens


def experts(model: Model, work: Work) -> Iterator[Case]:
    """Routing, and the experts of a layer as a whole (order, products, activation, sum)."""
    if not model.experts:
        return
    routing = Routing(top_k=model.shape["num_experts_per_tok"], renormalise=True)
    ways = [Way("own", lambda x: route_triton(x, routing)), Way("torch", lambda x: route_torch(x, routing))]
    for tokens in work.rows:
        logits = [(randn(tokens, model.experts),) for _ in range(8)]
        moved = tokens * (2.0 * model.experts + 8.0 * routing.top_k)
        yield Case("route", f"{tokens} tokens", logits, ways, moved, "copy")
    shapes = (2 * model.inner, model.hidden), (model.hidden, model.inner)
    for kind in work.kinds:
        stacks = [random_weight(kind, shape, model.experts) for shape in shapes]
        for tokens in work.rows:
            yield _experts_of(model, routing, kind, stacks, tokens)


def _experts_of(model: Model, routing: Routing, kind: str, stacks: Sequence[Any], tokens: int) -> Case:
    options: dict[str, Any] = {"act": "silu"}
    if "swiglu_limit" in model.shape:  # GPT-OSS's: clamped, and with biases
        options |= {"limit": model.shape["swiglu_limit"], "alpha": 1.702}
        options |= {"gate_up_bias": randn(model.experts, 2 * model.inner)}
        options |= {"down_bias": randn(model.experts, model.hidden)}
    routed = [route_torch(randn(tokens, model.experts), routing) for _ in range(8 if tokens <= 512 else 2)]
    inputs = [(randn(tokens, model.hidden), *stacks, *each) for each in routed]
    pairs = tokens * routing.top_k
    bound = 6.0 * pairs * model.inner * model.hidden, "product"
    if pairs < 256 * model.experts:  # reading the used experts takes longer
        touched = sum(len(chosen.unique()) for _, chosen in routed) / len(routed)
        bound = touched * sum(each.nbytes for each in stacks) / model.experts, "read"
    usual: dict[str, Run] = {"many": experts_many}
    if kind == "none":
        usual |= {"invariant": experts_invariant_triton, "torch": experts_grouped}
    if pairs <= FEW_PAIRS:
        usual["few"] = experts_few if kind == "none" else experts_few_packed
    ways = [Way(name, partial(run, **options)) for name, run in usual.items()]
    found = _experts_tiles(model, kind, stacks, pairs, options)
    what = f"{tokens} tokens{f', {kind}' * (kind != 'none')}"
    return Case("experts", what, inputs, ways, *bound, partial(experts_in_turn, *inputs[0], **options), found)


def _experts_tiles(model: Model, kind: str, stacks: Sequence[Any], pairs: int, options: Any) -> Iterator[Way]:
    rows = pairs / min(pairs, model.experts)
    if pairs <= FEW_PAIRS:
        yield from _few_tiles(model, kind, stacks, options)
    for tiles in _many_tiles(rows, {"none": 2.0, "int4": 0.5}.get(kind, 1.0)):
        yield Way(f"many {tiles}", partial(experts_many, tiles=tiles, **options))
    for tiles in _many_tiles(rows, 1.0) if kind not in ("none", "int4") and rows > 16 else ():
        yield Way(f"scaled {tiles}", partial(experts_many, rows=KINDS[kind][0], tiles=tiles, **options), ROUNDED)


def _few_tiles(model: Model, kind: str, stacks: Sequence[Any], options: Any) -> Iterator[Way]:
    """Other tiles of either of the two kernels, with 16 to 256 bytes of weights for each thread."""
    top_k, bits = model.shape["num_experts_per_tok"], {"none": 16, "int4": 4}.get(kind, 8)
    usual = {"up": up_config(model.inner, model.hidden, True), "down_tiles": down_config(top_k, model.inner)}
    for (name, default), stack, rows in zip(usual.items(), stacks, (2, top_k), strict=True):
        for n, k, warps in product((1, 2, 4, 8), (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
            if not 16 <= rows * n * k // (32 * warps) * bits // 8 <= 256 or k > 2 * stack.shape[-1]:
                continue
            tiles = {"block_n": n, "block_k": k, "num_warps": warps}
            if kind == "none":
                given: dict[str, Any] = {name: {**default, **tiles}, **options}
                run = partial(experts_few, **given)
            else:
                tiles["block_k"] = fitting_depth(stack, k)
                given = {name: tiles, **options}
                run = partial(experts_few_packed, **given)
            yield Way(f"few {name} {tiles}", run)


def _many_tiles(rows: float, size: float) -> Iterator[Tiles]:
    """Tiles that suit experts with this many rows and fit the shared memory; size: bytes of a weight."""
    heights = [m for m in (16, 32, 64, 128) if m <= max(16, 2 * rows) and 4 * m >= min(rows, 128)]
    for m, n, k, warps, stages in product(heights, (64, 128, 256), (64, 128), (4, 8), (3, 4, 5)):
        if (2 * m + size * n) * k * stages <= SHARED and 8 <= m * n // (32 * warps) <= 128:
            for down, group in product((n // 2, n), (1, 8) if rows > 256 else (8,)):
                yield Tiles(m, n, down, k, warps, stages, group)
