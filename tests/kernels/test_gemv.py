import collections
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.errors import NotSupported
from outpace.kernels.activation import ACTIVATIONS
from outpace.kernels.gemv import fused_linear_torch, gemv_config, gemv_tile, gemv_triton
from outpace.kernels.launch_options import MAX_ROWS, has_pdl
from tests.kernels.buffers import Output, poisoned, random_rows
from tests.kernels.test_activation import in_fp64
from tests.kernels.tolerances import DTYPES, ROUNDING, assert_close, assert_equal, on_gpu

# (M, N, K): no multiples of the tiles, fewer columns than a tile, several tiles, one output, one column
SHAPES = [(1, 1, 1), (1, 5, 17), (1, 7, 1000), (1, 3, 2500), (2, 4, 1024), (3, 5, 257), (5, 3, 300), (16, 3, 600)]
EPS = 1e-5
OPTIONS = ("bias", "norm_weight", "activation", "add")


def guarded(values: Tensor, before: int = 2) -> Tensor:
    """A contiguous copy of values with rows of NaN in front of it and behind."""
    base = torch.full((values.shape[0] + 2 * before, *values.shape[1:]), float("nan"), dtype=values.dtype)
    inside = base.to(values.device)[before : before + values.shape[0]]
    return inside.copy_(values)


def random_weight(rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight that keeps the size of what it multiplies, among rows of NaN."""
    return guarded((torch.randn(rows, depth, device=device) / depth**0.5).to(dtype))


def random_options(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, gated: bool, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Every option of gemv for x: [M, K] and N outputs, but for those left out."""
    rows, outputs, depth = shape
    options = {
        "bias": guarded(torch.randn(outputs * (2 if gated else 1), device=device).to(dtype)),
        "norm_weight": guarded((0.3 * torch.randn(depth, device=device)).to(dtype)),
        "weight_offset": 1.0,
        "eps": EPS,
        "activation": "silu" if gated else None,
        "add": random_rows((rows, outputs), dtype, device, gap=3),
    }
    return {name: value for name, value in options.items() if name not in without}


def oracle(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    centered: bool = False,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    activation: str | None = None,
    gated: bool = True,
    add: Tensor | None = None,
) -> Tensor:
    """gemv by its formula, in fp64 and with no rounding."""
    x = x.double()
    if norm_weight is not None:
        x = x - x.mean(1, keepdim=True) if centered else x
        x = x / (x.pow(2).mean(1, keepdim=True) + eps).sqrt() * (norm_weight.double() + weight_offset)
        x = x if norm_bias is None else x + norm_bias.double()
    y = x @ weight.double().T + (0 if bias is None else bias.double())
    if activation is not None and gated:
        gate, up = y.chunk(2, dim=1)
        y = in_fp64(gate, activation) * up
    elif activation is not None:
        y = in_fp64(y, activation)
    return y + (0 if add is None else add.double())


def check(x: Tensor, weight: Tensor, config: dict[str, int] | None = None, **options: Any) -> None:
    """The kernel against the exact result, which it rounds once, and against the ref, which rounds at every step."""
    kept = x.clone()
    want, ref = oracle(x, weight, **options), fused_linear_torch(x, weight, **options)
    out = Output.like(ref)
    assert gemv_triton(x, weight, out=out.view, config=config, **options) is out.view
    got = out.checked()
    assert_close(got, want)
    for y in (got.double(), want):
        size = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(y, ref.double(), rtol=4 * ROUNDING[x.dtype], atol=6 * size * ROUNDING[x.dtype])
    assert_equal(x, kept)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bare_and_with_everything(
    shape: tuple[int, int, int], dtype: torch.dtype, gated: bool, device: torch.device
) -> None:
    rows, outputs, depth = shape
    x, weight = random_rows((rows, depth), dtype, device), random_weight(outputs * (1 + gated), depth, dtype, device)
    check(x, weight, activation="silu" if gated else None)
    check(x, weight, **random_options(shape, dtype, device, gated=gated))


@pytest.mark.parametrize("without", list(itertools.product(*(("", name) for name in OPTIONS))), ids="-".join)
def test_every_combination_of_options(without: tuple[str, ...], device: torch.device) -> None:
    shape, gated = (2, 3, 70), "activation" not in without
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = random_rows((2, 70), dtype, device), random_weight(3 * (1 + gated), 70, dtype, device)
        check(x, weight, **random_options(shape, dtype, device, gated=gated, without=without))


@pytest.mark.parametrize(
    "config",
    [
        {"block_n": block_n, "block_k": block_k, "num_warps": num_warps}
        for block_n, block_k, num_warps in [(1, 16, 1), (4, 32, 2), (8, 64, 4), (2, 128, 8)]
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
@pytest.mark.parametrize("depth", [64, 100])
def test_every_tile(depth: int, config: dict[str, int], device: torch.device) -> None:
    for rows, gated in ((1, False), (1, True), (3, True)):
        x = random_rows((rows, depth), torch.float32, device)
        weight = random_weight(5 * (1 + gated), depth, torch.float32, device)
        check(x, weight, config, **random_options((rows, 5, depth), torch.float32, device, gated=gated))


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_every_number_of_rows(rows: int, device: torch.device) -> None:
    x, weight = random_rows((rows, 40), torch.float32, device), random_weight(3, 40, torch.float32, device)
    check(x, weight, **random_options((rows, 3, 40), torch.float32, device, gated=False))


@pytest.mark.parametrize("kind", sorted(set(ACTIVATIONS.values())))
def test_every_activation(kind: str, device: torch.device) -> None:
    x, weight = random_rows((2, 33), torch.float32, device), random_weight(10, 33, torch.float32, device)
    check(x, weight, activation=kind)
    assert_equal(gemv_triton(x, weight, activation="swish"), gemv_triton(x, weight, activation="silu"))


def test_fp32_norm_is_exact_to_1e_5(device: torch.device) -> None:
    """Relative to the size of the result, for small and large x, and for an eps that counts."""
    weight, norm_weight = random_weight(16, 4096, torch.float32, device), torch.rand(4096, device=device)
    for scale, eps in ((1e-3, 1e-6), (1.0, 1e-5), (1e3, 1e-5), (0.0, 1e-5)):
        x = scale * torch.randn(1, 4096, device=device)
        got = gemv_triton(x, weight, norm_weight=norm_weight, eps=eps).double()
        want = oracle(x, weight, norm_weight=norm_weight, eps=eps)
        assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ref_rounds_as_hugging_face(dtype: torch.dtype, device: torch.device) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    norm = LlamaRMSNorm(24, eps=EPS).to(device, dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    mlp = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2)).to(device, dtype)
    x, add = random_rows((3, 24), dtype, device), random_rows((3, 24), dtype, device)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    with torch.no_grad():
        h = fused_linear_torch(x, gate_up, norm_weight=norm.weight, eps=EPS, activation="silu")
        got = fused_linear_torch(h, mlp.down_proj.weight, add=add)
        want = mlp(norm(x)) + add
    assert_close(got, want, roundings=2, magnitude=1.0)  # Hugging Face rounds silu(gate) too


def test_weight_rows_apart_and_fp32_norm_weight(device: torch.device) -> None:
    values = torch.randn(5, 33, device=device).to(torch.bfloat16)
    x, weight = random_rows((1, 33), torch.bfloat16, device), poisoned(values, gap=7)
    check(x, weight, norm_weight=torch.rand(33, device=device), eps=EPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")
def test_reads_each_weight_once_and_nothing_around(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers read in vain show in no result. Programs beyond the last row may read the last row again."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, read = InterpreterBuilder.create_masked_load, list[int]()

    def noted(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        read.extend(ptrs.data[mask.data].tolist())
        return load(self, ptrs, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted)
    x, weight = random_rows((3, 70), torch.float32, device), random_weight(10, 70, torch.float32, device)
    options = random_options((3, 5, 70), torch.float32, device, gated=True)
    gemv_triton(x, weight, **options, config={"block_n": 4, "block_k": 32})
    operands = [x, weight, *(value for value in options.values() if isinstance(value, Tensor))]
    inside = {row.data_ptr() + 4 * i for t in operands for row in t.view(-1, t.shape[-1]) for i in range(len(row))}
    assert set(read) <= inside, "read out of bounds"
    times = collections.Counter(read)
    full = [weight[n].data_ptr() + 4 * i for n in (0, 1, 2, 3, 5, 6, 7, 8) for i in range(70)]
    assert {times[at] for at in full} == {1}


def test_one_row_of_any_stride(device: torch.device) -> None:
    x, weight = torch.randn(3, 33, device=device)[1:2], random_weight(5, 33, torch.float32, device)
    assert_equal(gemv_triton(x.as_strided((1, 33), (7, 1), x.storage_offset()), weight), gemv_triton(x, weight))


def test_out_may_be_add(device: torch.device) -> None:
    x, weight = random_rows((2, 33), torch.float32, device), random_weight(5, 33, torch.float32, device)
    add = random_rows((2, 5), torch.float32, device)
    for gemv in (gemv_triton, fused_linear_torch):
        total = add.clone()
        assert gemv(x, weight, add=total, out=total) is total
        assert_close(total, oracle(x, weight, add=add))


def test_rounding_before_the_weight_changes_the_ref_alone(device: torch.device) -> None:
    x, weight = random_rows((1, 257), torch.bfloat16, device), random_weight(9, 257, torch.bfloat16, device)
    options = random_options((1, 9, 257), torch.bfloat16, device, gated=False)
    both = [gemv_triton(x, weight, **options, round_before_weight=first) for first in (False, True)]
    assert_equal(both[0], both[1])
    as_gemma = fused_linear_torch(x, weight, **options, round_before_weight=False)
    assert_close(both[0], as_gemma, roundings=2, magnitude=4.0)


def test_pdl_changes_nothing(device: torch.device) -> None:
    x, weight = random_rows((1, 300), torch.bfloat16, device), random_weight(9, 300, torch.bfloat16, device)
    for config in ({"block_k": 64}, {"block_k": 512}):
        assert_equal(gemv_triton(x, weight, pdl=True, config=config), gemv_triton(x, weight, config=config))
    assert not has_pdl(torch.device("cpu"))


@on_gpu
def test_a_chain_with_pdl_waits_for_x(device: torch.device) -> None:
    """Each product reads what the one in front has just written, over and over in one buffer."""
    weights = [torch.randn(2048, 2048, device=device).bfloat16() / 45 for _ in range(8)]
    start = torch.randn(1, 2048, device=device).bfloat16()

    def chain(pdl: bool) -> Tensor:
        a, b = start.clone(), torch.empty_like(start)
        for weight in weights * 8:
            gemv_triton(a, weight, out=b, pdl=pdl)
            a, b = b, a
        return a

    want = chain(False)
    for _ in range(20):
        assert_equal(chain(True), want)


@on_gpu
def test_more_than_2_31_elements(device: torch.device) -> None:
    weight = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device=device)
    weight[-5:] = torch.randn(5, 32_768, device=device) / 181
    x = torch.randn(1, 32_768, device=device).bfloat16()
    assert_close(gemv_triton(x, weight)[:, -5:], oracle(x, weight[-5:]))


def test_nothing_to_do(device: torch.device) -> None:
    assert gemv_triton(torch.empty(0, 8, device=device), torch.empty(4, 8, device=device)).shape == (0, 4)
    assert gemv_triton(torch.empty(2, 8, device=device), torch.empty(0, 8, device=device)).shape == (2, 0)


def test_what_it_refuses(device: torch.device) -> None:
    x, weight = torch.zeros(1, 8, device=device), torch.zeros(4, 8, device=device)
    with pytest.raises(AssertionError, match="17 rows"):
        gemv_triton(torch.zeros(17, 8, device=device), weight)
    with pytest.raises(AssertionError, match="rows cannot be halved"):
        gemv_triton(x, weight[:3], activation="silu")
    with pytest.raises(AssertionError, match="contiguous"):
        gemv_triton(x, torch.zeros(8, 4, device=device).T)
    with pytest.raises(NotSupported, match="mish"):
        gemv_triton(x, weight, activation="mish")
    wrongs: list[dict[str, Any]] = [
        {"bias": weight[0]},
        {"norm_weight": x[0, :3]},
        {"add": x},
        {"out": x},
        {"add": x[:, :4].half()},
    ]
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            gemv_triton(x, weight, **wrong)
    with pytest.raises(AssertionError):
        gemv_triton(x.half(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 17, 300, 2500])
def test_a_layer_norm_and_a_plain_activation(depth: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random_rows((1, depth), dtype, device) + 3  # a mean that counts
    weight = random_weight(5, depth, dtype, device)
    bias, norm, norm_bias = (guarded(torch.randn(size, device=device).to(dtype)) for size in (5, depth, depth))
    add = random_rows((1, 5), dtype, device, gap=3)
    plain: dict[str, Any] = {"activation": "relu", "gated": False}
    check(x, weight, bias=bias, **plain)  # and no sum, which may be far smaller than what is rounded in between
    if depth == 1:
        return  # its deviation is zero, and what is left is rounding
    check(x, weight, norm_weight=norm, centered=True, eps=EPS)
    check(x, weight, norm_weight=norm, norm_bias=norm_bias, centered=True, eps=EPS, bias=bias, add=add, **plain)


def test_a_layer_norm_of_several_rows_is_refused(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="several rows"):
        gemv_triton(torch.ones(2, 8, device=device), torch.ones(3, 8, device=device), centered=True)


def test_choices_are_pure_and_sane() -> None:
    depths = (1, 17, 512, 1024, 2048, 2304, 3584, 4096, 5120, 8192, 11008, 14336, 18944)
    for outputs, depth, gated, normed in itertools.product(
        (1, 4096, 28672, 256000), depths, (False, True), (False, True)
    ):
        tile = gemv_tile(outputs, depth, gated=gated, normed=normed)
        assert tile.block_k & (tile.block_k - 1) == 0
        assert tile.block_k < max(256, 2 * depth)
        assert (1 + gated) * tile.block_n * tile.block_k <= 64 * 32 * tile.num_warps  # that registers hold
    for rows in range(1, MAX_ROWS + 1):
        assert gemv_config(rows, 4096, 4096)["num_stages"] == 1
