"""Experts: every implementation against the formula in fp64, and against Hugging Face's modules."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.errors import NotSupported
from outpace.kernels import experts_sort as module
from outpace.kernels.experts import (
    experts_grouped,
    experts_in_turn,
    experts_invariant_torch,
    experts_invariant_triton,
    experts_one_by_one,
    experts_torch,
    experts_triton,
    prefers_few,
)
from outpace.kernels.experts_few import down_config, experts_few, up_config
from outpace.kernels.experts_many import Tiles, experts_many, fixed_tiles, tiles_for
from outpace.kernels.experts_sort import max_tiles, sort_pairs
from tests.kernels.buffers import Output, poisoned, random_rows
from tests.kernels.test_activation import in_fp64
from tests.kernels.tolerances import DTYPES, ROUNDING, assert_equal, on_gpu

# numpy's words on what a GPU does in silence, in lanes that are not kept
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow).* encountered:RuntimeWarning"),
    pytest.mark.usefixtures("left_to_right"),
]

CPU = torch.device("cpu")
TORCH = [experts_in_turn, experts_torch, experts_grouped, experts_one_by_one, experts_invariant_torch]
# (T, K, E, H, I): no multiples of tiles; one expert, few, many; one token, many
SHAPES = [
    (1, 1, 1, 16, 8),
    (1, 2, 3, 40, 24),
    (2, 3, 3, 17, 33),
    (7, 2, 8, 72, 40),
    (33, 1, 70, 24, 16),
    (70, 2, 2, 40, 24),
]


@dataclass
class Call:
    """The arguments of experts."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    chosen: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, experts: Callable[..., Tensor], **more: Any) -> Tensor:
        return experts(self.x, self.gate_up, self.down, self.weights, self.chosen, **{**self.options, **more})

    def part(self, rows: Any) -> "Call":
        """The same with some of the tokens."""
        return replace(self, x=self.x[rows].clone(), weights=self.weights[rows], chosen=self.chosen[rows])


def call_of(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
    **options: Any,
) -> Call:
    """Random experts of this shape (T, K, E, H, I), each token with different ones."""
    tokens, top_k, experts, hidden, inner = shape
    rows = inner * (2 if options.get("gated", True) else 1)
    options = {"act": "silu", **options}

    def weight(*size: int) -> Tensor:
        return (torch.randn(size, device=device) / size[-1] ** 0.5).to(dtype)

    if bias:
        options |= {"gate_up_bias": weight(experts, rows) * 3, "down_bias": weight(experts, hidden) * 3}
    chosen = torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :top_k].int()
    weights = torch.rand(tokens, top_k, device=device)
    x = random_rows((tokens, hidden), dtype, device, gap=8)
    return Call(x, weight(experts, rows, hidden), weight(experts, hidden, inner), weights, chosen.contiguous(), options)


def exact(call: Call) -> Tensor:
    """The formula, for every pair of a token and an expert, in fp64."""
    options, experts = call.options, len(call.gate_up)
    real = (call.chosen >= 0) & (call.chosen < experts)
    ids = call.chosen.long().clamp(0, experts - 1)  # [T, K]

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = (weight[ids].double() @ x[..., None]).squeeze(-1)
        return y if bias is None else y + bias[ids].double()

    h = product(call.x.double()[:, None], call.gate_up, options.get("gate_up_bias"))
    y = product(_activated(h, options), call.down, options.get("down_bias"))
    return torch.where(real[:, :, None], y * call.weights[:, :, None].double(), 0.0).sum(dim=1)


def _activated(h: Tensor, options: dict[str, Any]) -> Tensor:
    if not options.get("gated", True):
        return in_fp64(h, options["act"])
    gate, up = h.chunk(2, dim=-1)
    if options.get("limit") is not None:
        gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
        return (up + 1) * gate * torch.sigmoid(options["alpha"] * gate)
    return in_fp64(gate, options["act"]) * up


def check(got: Tensor, want: Tensor) -> None:
    """Equal up to the roundings of h, y and the sum, of terms as large as the largest result."""
    assert not got.isnan().any()
    size = max(1.0, float(want.abs().max()))
    unit = ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=4 * unit, atol=4 * size * unit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("experts", TORCH)
def test_by_the_formula(
    experts: Callable[..., Tensor], shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    if experts is experts_grouped and (shape[3] % 8 or shape[4] % 8):
        pytest.skip("rows of a grouped product are multiples of 16 bytes")
    for options in ({}, {"bias": True}, {"bias": True, "limit": 1.0, "alpha": 1.7}, {"gated": False, "act": "gelu"}):
        call = call_of(shape, dtype, CPU, **options)
        check(call.run(experts), exact(call))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_hugging_face(dtype: torch.dtype) -> None:
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    call = call_of((21, 2, 6, 24, 16), dtype, CPU, bias=True, limit=0.7, alpha=1.7)
    small: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 16, "num_local_experts": 6}
    bias, down_bias = call.options["gate_up_bias"], call.options["down_bias"]
    plain, clamped = MixtralExperts(MixtralConfig(**small)), GptOssExperts(GptOssConfig(**small))
    plain.load_state_dict({"gate_up_proj": call.gate_up, "down_proj": call.down})
    interleaved = call.gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).transpose(1, 2)
    clamped.load_state_dict({
        "gate_up_proj": interleaved, "down_proj": call.down.transpose(1, 2), "down_proj_bias": down_bias,
        "gate_up_proj_bias": bias.unflatten(1, (2, -1)).transpose(1, 2).flatten(1),
    })  # fmt: skip
    clamped.limit, clamped.alpha = 0.7, 1.7
    with torch.no_grad():
        want = clamped.to(dtype)(call.x, call.chosen.long(), call.weights.to(dtype)).double()
        check(call.run(experts_in_turn), want)
        call.options = {"act": "silu"}
        check(call.run(experts_in_turn), plain.to(dtype)(call.x, call.chosen.long(), call.weights).double())


def small_tiles(tokens: int) -> Tiles:
    """So that few rows make several tiles, and short rows several columns; few programs for many tokens."""
    return Tiles(16, 32, 16, 16) if tokens < 30 else Tiles(64, 64, 32, 32)


TILE = {"block_n": 32, "block_k": 32}
KERNELS: dict[str, Callable[..., Tensor]] = {
    "few": partial(experts_few, up=TILE, down_tiles=TILE),
    "many": lambda x, *rest, **options: experts_many(x, *rest, tiles=small_tiles(len(x)), **options),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels(
    kernel: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    if shape[0] > 30 and (kernel == "few" or dtype == torch.float16):
        pytest.skip("few never has so many pairs, and each costs time")
    bare = call_of(shape, dtype, device)
    full = call_of(shape, dtype, device, bias=True, limit=1.0, alpha=1.7)
    for call in (bare, full) if shape[0] < 7 else (full,):
        got = call.run(KERNELS[kernel])
        check(got, exact(call))
        check(got, call.run(experts_in_turn).double())


@pytest.mark.parametrize("top_k", range(1, 9))
@pytest.mark.parametrize("kernel", ["few", "many"])
def test_every_top_k(kernel: str, top_k: int, device: torch.device) -> None:
    call = call_of((1, top_k, 8, 24, 16), torch.float32, device, bias=True)
    check(call.run(KERNELS[kernel]), exact(call))


@pytest.mark.parametrize("kernel", ["few", "many"])
def test_without_gates(kernel: str, device: torch.device) -> None:
    for act in ("gelu", "relu2"):
        call = call_of((3, 2, 4, 40, 24), torch.float32, device, bias=True, gated=False, act=act)
        check(call.run(KERNELS[kernel]), exact(call))


EVERY: dict[str, Callable[..., Tensor]] = {**{run.__name__: run for run in TORCH}, **KERNELS}


def where(name: str, device: torch.device) -> torch.device:
    """Torch's implementations are tested on a CPU."""
    return device if name in KERNELS else CPU


@pytest.mark.parametrize("name", EVERY)
def test_ids_out_of_range_and_one_expert_for_all(name: str, device: torch.device) -> None:
    run, device = EVERY[name], where(name, device)
    call = call_of((5, 3, 8, 24, 16), torch.float32, device, bias=True)
    ids = [[-1, 3, 8], [2**31 - 1, -(2**31), 0], [-1, -1, -1], [7, 100, 6]]
    call.chosen[:4] = torch.tensor(ids, dtype=torch.int32, device=device)
    call.x[2] = float("nan")  # a token of padding
    assert (call.run(run)[2] == 0).all()
    call.x[2] = 0
    check(call.run(run), exact(call))
    call.chosen[:] = 5
    check(call.run(run), exact(call))
    call.chosen[:] = -1
    assert (call.run(run) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*EVERY, "experts_triton", "experts_invariant_triton"])
def test_add_is_as_a_sum_of_its_own(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit, into new memory, into other memory and over what is added; ids outside leave what is added."""
    run = {**EVERY, "experts_triton": experts_triton, "experts_invariant_triton": experts_invariant_triton}[name]
    for tokens in (1, 5):
        call = call_of((tokens, 2, 4, 40, 24), dtype, device, bias=True)
        call.chosen[0, 0], call.chosen[-1] = -1, 4
        add = random_rows((tokens, 40), dtype, device)
        before, alone = add.clone(), call.run(run)
        want = alone + add
        assert_equal(call.run(run, add=add), want)
        for more in (None, add):
            other = Output.like(want)
            assert call.run(run, add=more, out=other.view) is other.view
            assert_equal(other.checked(), alone if more is None else want)
        assert_equal(add, before)
        assert call.run(run, add=add, out=add) is add
        assert_equal(add, want)
        want = alone + call.x
        assert call.run(run, add=call.x, out=call.x) is call.x  # a layer whose norm stands behind its experts
        assert_equal(call.x, want)
        empty = call.part(slice(0, 0))
        assert_equal(empty.run(run, add=empty.x, out=empty.x), empty.x)


@pytest.mark.parametrize("name", EVERY)
def test_garbage_disturbs_no_other_token_and_nothing_around_is_read(name: str, device: torch.device) -> None:
    """Weights lie among NaNs; one token is NaN, and so is whatever memory the kernels work in."""
    dtype = torch.bfloat16 if name in KERNELS else torch.float32
    call = call_of((9, 2, 4, 24, 16), dtype, where(name, device))
    call.gate_up, call.down = poisoned(call.gate_up, 8), poisoned(call.down, 8)
    call.x[3] = float("nan")
    got, rest = call.run(EVERY[name]), [0, 1, 2, 4, 5, 6, 7, 8]
    check(got[rest], exact(call.part(rest)))


def test_tiles_change_the_speed_alone(device: torch.device) -> None:
    call = call_of((3, 2, 4, 70, 40), torch.float32, device, bias=True)
    want = exact(call)
    for block_n, block_k in ((8, 16), (16, 32), (8, 128)):
        tile = {"block_n": block_n, "block_k": block_k}
        check(call.run(experts_few, up=tile, down_tiles=tile), want)
    for tiles in (Tiles(16, 16, 16, 16), Tiles(64, 32, 64, 32, group_m=1), Tiles(32, 64, 16, 64, group_m=3)):
        check(call.run(experts_many, tiles=tiles), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bias": True, "limit": 1.0, "alpha": 1.7}, {"gated": False}], ids=str)
def test_invariant(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit the same alone, in batches of other sizes and at other places."""
    call = call_of((70, 2, 8, 41, 23), dtype, CPU, **options)
    whole = call.run(experts_invariant_torch)
    for rows in ([0], [69], [5, 1], list(range(30, 64)), torch.randperm(70).tolist()):
        assert_equal(call.part(rows).run(experts_invariant_torch), whole[rows])
    if not options or "bias" in options:
        call = call_of((20, 2, 4, 41, 23), dtype, device, **options)
        whole = call.run(experts_invariant_triton)
        check(whole, exact(call))
        for rows in ([0], [19, 5], torch.randperm(20)[:10].tolist()):
            assert_equal(call.part(rows).run(experts_invariant_triton), whole[rows])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 200), st.integers(1, 8), st.sampled_from([1, 3, 8, 128]), st.sampled_from([16, 64]), st.integers()
)
def test_sorting_is_a_bijection(
    device: torch.device, tokens: int, top_k: int, experts: int, block_m: int, seed: int
) -> None:
    torch.manual_seed(seed % 2**32)
    chosen = torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32, device=device)
    if seed % 3 == 0:
        chosen[:] = experts - 1
    check_order(chosen, experts, block_m)


def test_sorting_in_several_passes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLACE_BLOCKS", (16,))
    check_order(torch.randint(-2, 5, (30, 3), dtype=torch.int32, device=device), 3, 16)
    check_order(torch.zeros(100, 3, dtype=torch.int32, device=device), 2, 16)


@pytest.mark.parametrize(
    ("pairs", "experts"),
    [(1, 1), (1, 5), (255, 8), (256, 1), (256, 70), (257, 5), (1024, 8), (1025, 5), (4096, 1), (4096, 5), (4097, 8)],
)
def test_sorting_where_the_sizes_of_blocks_end(pairs: int, experts: int, device: torch.device) -> None:
    """Up to the largest block one kernel counts and places; some ids are outside, and some experts have no pair."""
    chosen = torch.randint(-2, experts + 2, (pairs, 1), dtype=torch.int32, device=device)
    check_order(chosen, experts, 64)
    chosen[chosen % 3 == 0] = 2**31 - 1
    chosen[: pairs // 2] = -(2**31)
    check_order(chosen, experts, 16 if pairs < 300 else 64)
    check_order(torch.full_like(chosen, experts - pairs % 2), experts, 64)  # all outside, or all one expert's


def test_few_pairs_are_not_counted_by_a_kernel_of_their_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = module._count_kernel
    monkeypatch.setattr(module, "_count_kernel", None)
    check_order(torch.zeros(4096, 1, dtype=torch.int32, device=device), 2, 64)
    monkeypatch.setattr(module, "_count_kernel", counted)
    check_order(torch.zeros(4097, 1, dtype=torch.int32, device=device), 2, 64)


def check_order(chosen: Tensor, experts: int, block_m: int) -> None:
    """Each pair that has an expert stands once in the order, by expert, and once in a tile of that expert."""
    order, tiles = sort_pairs(chosen, experts, block_m)
    ids = chosen.flatten().tolist()
    want = sorted((pair for pair in range(len(ids)) if 0 <= ids[pair] < experts), key=lambda pair: ids[pair])
    assert order.tolist()[: len(want)] == want  # each pair once, by expert, then in its order
    assert tiles.shape == (3, max_tiles(len(ids), experts, block_m))
    seen = []
    for expert, first, end in tiles.T.tolist():
        if expert >= 0:
            rows = want[first : min(first + block_m, end)]
            assert rows
            assert {ids[pair] for pair in rows} == {expert}
            seen += rows
    assert seen == want


def test_choices_are_pure_and_sane() -> None:
    assert prefers_few(1, 2, 8)
    assert prefers_few(8, 8, 128)
    assert not prefers_few(4, 2, 8)
    assert not prefers_few(1024, 8, 128)
    for pairs, experts in ((1, 1), (100, 128), (4096, 8), (65536, 128)):
        for dtype in DTYPES:
            tiles = tiles_for(pairs, experts, dtype)
            assert all(n >= 16 and n & (n - 1) == 0 for n in (tiles.block_m, tiles.up_n, tiles.down_n, tiles.block_k))
    assert fixed_tiles(torch.bfloat16).block_m == 64
    for depth in (1, 700, 768, 2880, 14336):
        assert down_config(8, depth)["block_k"] <= max(128, 2 * depth)
        assert up_config(768, depth, gated=True)["block_k"] <= max(128, 2 * depth)


@pytest.mark.parametrize("experts", [experts_triton, experts_invariant_triton])
def test_what_they_refuse(experts: Callable[..., Tensor], device: torch.device) -> None:
    call = call_of((2, 2, 4, 24, 16), torch.float32, device)
    assert call.part(slice(0, 0)).run(experts).shape == (0, 24)
    wrongs: list[dict[str, Any]] = [
        {"x": call.x.half()},
        {"x": call.x[:, :8]},
        {"chosen": call.chosen.long()},
        {"chosen": call.chosen[:1]},
        {"weights": call.weights.half()},
        {"down": call.down.transpose(1, 2)},
        {"gate_up": call.gate_up[:, :8]},
        {"options": {"act": "silu", "limit": 1.0}},
        {"options": {"act": "silu", "down_bias": torch.zeros(4, 16, device=device)}},
        {"options": {"act": "silu", "add": call.x[:1]}},
        {"options": {"act": "silu", "out": call.x.half()}},
        {"options": {"act": "silu", "add": torch.zeros(24, 2, device=device).t()}},
    ]
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            replace(call, **wrong).run(experts)
    with pytest.raises(NotSupported, match="mish"):
        replace(call, options={"act": "mish"}).run(experts)


@on_gpu
@pytest.mark.parametrize(
    "experts", [experts_torch, experts_grouped, experts_one_by_one, experts_triton, experts_invariant_triton]
)
def test_a_graph_holds_them(experts: Callable[..., Tensor], device: torch.device) -> None:
    """Captured once, replayed for tokens and experts that were not there at the capture."""
    for tokens in (1, 7, 300):
        call = call_of((tokens, 4, 32, 256, 128), torch.bfloat16, device, bias=True)
        other = call_of((tokens, 4, 32, 256, 128), torch.bfloat16, device)
        for _ in range(2):
            call.run(experts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call.run(experts)
        call.x.copy_(other.x)
        call.weights.copy_(other.weights)
        call.chosen.copy_(other.chosen)
        call.chosen[0, 0] = -1
        graph.replay()
        check(out, exact(call))


@on_gpu
@pytest.mark.parametrize("shape", [(1, 8, 128, 2048, 768), (40, 8, 128, 2048, 768), (600, 2, 8, 1024, 1792)])
def test_the_default_tiles_on_a_gpu(shape: tuple[int, int, int, int, int], device: torch.device) -> None:
    call = call_of(shape, torch.bfloat16, device)
    want = call.run(experts_in_turn).double()
    for experts in (experts_torch, experts_triton, experts_many, experts_invariant_triton):
        check(call.run(experts), want)
    whole = call.run(experts_invariant_triton)
    for rows in ([0], list(range(shape[0] // 2, shape[0]))):
        assert_equal(call.part(rows).run(experts_invariant_triton), whole[rows])


@on_gpu
def test_more_than_2_31_weights(device: torch.device) -> None:
    call = call_of((3, 2, 2, 4096, 1024), torch.bfloat16, device)
    gate_up = torch.zeros(300, 2048, 4096, dtype=torch.bfloat16, device=device)
    down = torch.zeros(600, 4096, 1024, dtype=torch.bfloat16, device=device)[:300]
    gate_up[-2:], down[-2:] = call.gate_up, call.down
    far = replace(call, gate_up=gate_up, down=down, chosen=call.chosen + 298)
    for experts in (experts_few, experts_many):
        assert_equal(far.run(experts), call.run(experts))
