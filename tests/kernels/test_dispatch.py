import functools
import logging
from typing import Any

import pytest
import torch

from outpace.errors import ConfigError
from outpace.kernels import dispatch
from outpace.kernels.activation import gated_act_torch, gated_act_triton
from outpace.kernels.dispatch import OF_STEPS, choose_kernels, for_device
from outpace.kernels.draw import draw_torch, draw_triton
from outpace.kernels.experts import experts_invariant_torch, experts_invariant_triton, experts_torch, experts_triton
from outpace.kernels.few_rows import linear_few_rows
from outpace.kernels.invariant import bias_act_invariant, gated_act_invariant
from outpace.kernels.library import TunedLinear
from outpace.kernels.matmul import matmul_invariant_torch, matmul_invariant_triton, matmul_torch
from outpace.kernels.routing import route_torch, route_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)


def test_defaults() -> None:
    kernels = choose_kernels(CPU)
    assert (kernels.linear, kernels.gemv, kernels.gated_act) == (matmul_torch, None, gated_act_torch)
    kernels = choose_kernels(CUDA)
    assert kernels.gated_act is gated_act_triton
    assert kernels.gemv.func is linear_few_rows  # type: ignore[union-attr]
    assert kernels.linear is matmul_torch
    tuned = [choose_kernels(CUDA, {"linear": "tuned"}).linear for _ in range(2)]
    assert all(isinstance(linear, TunedLinear) for linear in tuned)
    assert tuned[0] is not tuned[1], "each model has a table of its own"


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_deterministic(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernels = choose_kernels(device, deterministic=True)
    linear = matmul_invariant_torch if device == CPU else matmul_invariant_triton
    assert (kernels.linear, kernels.gemv) == (linear, None)
    assert "batch-invariant" in caplog.text
    assert isinstance(kernels.attention, functools.partial)
    assert kernels.attention.keywords == {"invariant": True}
    if device == CPU:
        assert (kernels.gated_act, kernels.bias_act) == (gated_act_invariant, bias_act_invariant)
    else:
        assert kernels.gated_act is gated_act_triton


def test_the_linear_alone() -> None:
    kernels = choose_kernels(CUDA, {"linear": "invariant"})
    assert (kernels.linear, kernels.gemv) == (matmul_invariant_triton, None)
    assert kernels.gated_act is gated_act_triton


def test_experts() -> None:
    for device, route, experts, invariant in (
        (CPU, route_torch, experts_torch, experts_invariant_torch),
        (CUDA, route_triton, experts_triton, experts_invariant_triton),
    ):
        kernels = choose_kernels(device)
        assert (kernels.route, kernels.experts) == (route, experts)
        kernels = choose_kernels(device, deterministic=True)
        assert (kernels.route, kernels.experts) == (route, invariant)
    kernels = choose_kernels(CUDA, {"experts": "torch", "route": "torch"})
    assert (kernels.route, kernels.experts) == (route_torch, experts_torch)


def test_what_runs_around_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (for_device("draw", CPU), for_device("draw", CUDA)) == (draw_torch, draw_triton)
    assert all(set(ops) == {"torch", "triton"} for ops in OF_STEPS.values())
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert for_device("draw", CUDA) is draw_torch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asked": {"magic": "torch"}}, "no op is called 'magic'"),
        ({"asked": {"linear": "triton"}}, r"kernels\.linear: 'triton' is not one of torch, invariant"),
        ({"asked": {"linear": "torch"}, "deterministic": True}, r"kernels\.linear: 'torch' is not deterministic"),
        ({"asked": {"linear": "tuned"}, "deterministic": True}, r"kernels\.linear: 'tuned' is not deterministic"),
        ({"asked": {"gemv": "triton"}, "deterministic": True}, r"kernels\.gemv: 'triton' is not deterministic"),
        ({"asked": {"gemv": "triton", "linear": "invariant"}}, r"kernels\.gemv: 'triton' would take few rows"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_kernels(CUDA, **options)


def test_what_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.linear: 'tuned' chooses among the algorithms of a GPU's library"):
        choose_kernels(CPU, {"linear": "tuned"})


def test_what_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with pytest.raises(ConfigError, match="deterministic: on a GPU it needs Triton"):
        choose_kernels(CUDA, deterministic=True)
    with pytest.raises(ConfigError, match="Triton kernels need a GPU and Triton"):
        choose_kernels(CUDA, {"gemv": "triton"})
