"""Experts: every implementation against the formula in fp64, and against Hugging Face's modules."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.kernels.experts import experts_grouped, experts_invariant, experts_one_by_one, experts_ref, experts_torch
from tests.kernels.buffers import random_rows
from tests.kernels.test_activation import in_fp64
from tests.kernels.tolerances import DTYPES, ROUNDING, assert_equal

CPU = torch.device("cpu")
TORCH = [experts_ref, experts_torch, experts_grouped, experts_one_by_one, experts_invariant]
# (T, K, E, H, I): no multiples of tiles; one expert, few, many; one token, many
SHAPES = [
    (1, 1, 1, 16, 8),
    (1, 2, 3, 40, 24),
    (2, 3, 3, 17, 33),
    (7, 2, 8, 72, 40),
    (33, 8, 128, 24, 16),
    (200, 2, 8, 40, 24),
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
    """The formula, pair by pair, in fp64."""
    options, total = call.options, torch.zeros(call.x.shape, dtype=torch.float64, device=call.x.device)
    for token, row in enumerate(call.chosen.tolist()):
        for k, expert in enumerate(row):
            if not 0 <= expert < len(call.gate_up):
                continue
            h = call.gate_up[expert].double() @ call.x[token].double()
            if options.get("gate_up_bias") is not None:
                h = h + options["gate_up_bias"][expert].double()
            y = call.down[expert].double() @ _activated(h, options)
            if options.get("down_bias") is not None:
                y = y + options["down_bias"][expert].double()
            total[token] += y * call.weights[token, k].double()
    return total


def _activated(h: Tensor, options: dict[str, Any]) -> Tensor:
    if not options.get("gated", True):
        return in_fp64(h, options["act"])
    gate, up = h.chunk(2)
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


@pytest.mark.parametrize("experts", TORCH)
def test_no_expert_at_all_and_one_for_all(experts: Callable[..., Tensor]) -> None:
    call = call_of((9, 3, 8, 24, 16), torch.float32, CPU, bias=True)
    call.chosen[:4] = torch.tensor([[-1, 3, 8], [2**31 - 1, -(2**31), 0], [-1, -1, -1], [7, 100, 6]])
    call.x[2] = float("nan")  # a token of padding
    assert (call.run(experts)[2] == 0).all()
    call.x[2] = 0
    check(call.run(experts), exact(call))
    call = call_of((20, 2, 8, 24, 16), torch.float32, CPU)
    call.chosen[:] = 5
    check(call.run(experts), exact(call))
    assert call.part(slice(0, 0)).run(experts).shape == (0, 24)


@pytest.mark.parametrize("experts", TORCH)
def test_a_token_of_garbage_disturbs_no_other(experts: Callable[..., Tensor]) -> None:
    call = call_of((9, 2, 4, 24, 16), torch.float32, CPU)
    call.x[3] = float("nan")
    got, rest = call.run(experts), [0, 1, 2, 4, 5, 6, 7, 8]
    check(got[rest], exact(call.part(rest)))


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
        check(call.run(experts_ref), want)
        call.options = {"act": "silu"}
        check(call.run(experts_ref), plain.to(dtype)(call.x, call.chosen.long(), call.weights).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bias": True, "limit": 1.0, "alpha": 1.7}, {"gated": False}], ids=str)
def test_invariant(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Bit for bit the same alone, in batches of other sizes and at other places."""
    call = call_of((70, 2, 8, 41, 23), dtype, CPU, **options)
    whole = call.run(experts_invariant)
    for rows in ([0], [69], [5, 1], list(range(30, 64)), torch.randperm(70).tolist()):
        assert_equal(call.part(rows).run(experts_invariant), whole[rows])
