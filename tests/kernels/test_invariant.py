import itertools

import pytest
import torch

from outpace.kernels.activation import ACTIVATIONS, bias_act_torch, gated_act_torch
from outpace.kernels.invariant import PIECE, bias_act_invariant, gated_act_invariant
from outpace.kernels.layer_norm import layer_norm_torch
from outpace.kernels.rms_norm import rms_norm_torch
from tests.kernels.buffers import Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal

CPU = torch.device("cpu")
KINDS = sorted(set(ACTIVATIONS.values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_activations(kind: str, dtype: torch.dtype) -> None:
    x, bias = random_rows((5, 34), dtype, CPU), torch.randn(34).to(dtype)
    want = gated_act_torch(x, kind)
    out = Output.like(want)
    gated_act_invariant(x, kind, out=out.view)
    assert_close(out.checked(), want)
    assert_equal(gated_act_invariant(x, kind), out.view)
    for given in (None, bias):
        want = bias_act_torch(x, given, kind)
        out = Output.like(want)
        bias_act_invariant(x, given, kind, out=out.view)
        assert_close(out.checked(), want)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [2, 54, 2100, PIECE + 2])
def test_a_row_is_the_same_in_every_tensor(width: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, bias = torch.randn(20, width), torch.randn(width)
        for kind in KINDS:
            gated, plain = gated_act_invariant(x, kind), bias_act_invariant(x, bias, kind)
            for start, stop in itertools.pairwise((0, 1, 10, 20)):
                assert torch.equal(gated_act_invariant(x[start:stop], kind), gated[start:stop]), (kind, start)
                assert torch.equal(bias_act_invariant(x[start:stop], bias, kind), plain[start:stop]), (kind, start)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [1, 50, 1000, 4096, 14336])
def test_norms_need_no_other_form(width: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(33, width).to(dtype), torch.randn(width).to(dtype)
            rms, layer = rms_norm_torch(x, weight, 1e-5), layer_norm_torch(x, weight, weight, 1e-5)
            for start, stop in itertools.pairwise((0, 1, 10, 17, 33)):
                part = x[start:stop].clone()
                assert torch.equal(rms_norm_torch(part, weight, 1e-5), rms[start:stop]), start
                assert torch.equal(layer_norm_torch(part, weight, weight, 1e-5), layer[start:stop]), start
    finally:
        torch.set_num_threads(before)


def test_nothing_to_do() -> None:
    assert gated_act_invariant(torch.empty(0, 8), "silu").shape == (0, 4)
    assert bias_act_invariant(torch.empty(0, 8), None, "silu").shape == (0, 8)
