from typing import Any

import pytest
import torch

from outpace.errors import NotSupported
from outpace.kernels.activation import (
    ACTIVATIONS,
    activation_kind,
    bias_act_torch,
    bias_act_triton,
    gated_act_torch,
    gated_act_triton,
)
from tests.kernels.buffers import Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close

# numpy's words on what a GPU does in silence: the sigmoid of a far negative number is 1 / (1 + inf).
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SHAPES = [(0, 17), (1, 1), (5, 3), (33, 17), (5, 257), (3, 1000), (1, 4097)]
KINDS = sorted(set(ACTIVATIONS.values()))


def in_fp64(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Each activation by its defining formula."""
    x = x.double()
    half_tanh = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return {
        "silu": x / (1 + torch.exp(-x)),
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": x * half_tanh,
        "quick_gelu": x / (1 + torch.exp(-1.702 * x)),
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
        "sigmoid": 1 / (1 + torch.exp(-x)),
    }[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_match_torch(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, bias = random_rows(shape, dtype, device), torch.randn(shape[1], device=device).to(dtype)
    pairs = random_rows((shape[0], 2 * shape[1]), dtype, device)
    calls: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (gated_act_torch, gated_act_triton, (pairs, "silu")),
        (bias_act_torch, bias_act_triton, (x, bias, "gelu_new")),
        (bias_act_torch, bias_act_triton, (x, None, "gelu_new")),
    ]
    for by_torch, kernel, args in calls:
        want = by_torch(*args)
        out = Output.like(want)
        assert kernel(*args, out=out.view) is out.view
        assert_close(out.checked(), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x = 4 * random_rows((3, 66), dtype, device)
    gate, up = x.double().chunk(2, dim=1)
    for gated in (gated_act_torch, gated_act_triton):
        assert_close(gated(x, kind), in_fp64(gate, kind) * up)
    bias = torch.randn(66, device=device).to(dtype)
    for biased in (bias_act_torch, bias_act_triton):
        assert_close(biased(x, bias, kind), in_fp64(x.double() + bias.double(), kind))
        assert_close(biased(x, None, kind), in_fp64(x, kind))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_names_mean_what_hugging_face_means(name: str, device: torch.device) -> None:
    from transformers.activations import ACT2FN

    x = 4 * torch.randn(3, 33, device=device)
    if name != "gelu_tanh":  # our own
        assert_close(bias_act_torch(x, None, name), ACT2FN[name](x))


@pytest.mark.parametrize("name", ["mish", "gelu_10", "SiLU", ""])
def test_an_unknown_name_is_named(name: str, device: torch.device) -> None:
    x = torch.zeros(1, 2, device=device)
    calls: list[tuple[Any, ...]] = [(activation_kind,), (gated_act_triton, x), (bias_act_torch, x, None)]
    for call, *args in calls:
        with pytest.raises(NotSupported, match=repr(name)):
            call(*args, name)


def test_far_inputs_and_nan(device: torch.device) -> None:
    x = torch.tensor([[-80.0, 80.0, float("nan")]], device=device)
    for kind in KINDS:
        assert_close(bias_act_triton(x, None, kind)[:, :2], bias_act_torch(x, None, kind)[:, :2])
        assert bias_act_triton(x, None, kind)[:, 2].isnan().all()


def test_in_place_and_other_tiles(device: torch.device) -> None:
    x, bias = random_rows((5, 33), torch.float32, device), torch.randn(33, device=device)
    want = bias_act_torch(x, bias, "relu2")
    assert_close(bias_act_triton(x, bias, "relu2", out=x, config={"block": 16, "num_warps": 1}), want)
