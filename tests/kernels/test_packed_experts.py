"""Experts with quantized weights: the references by their dequantized weights, the kernels against the formula."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.kernels.experts import (
    experts_in_turn,
    experts_invariant_torch,
    experts_invariant_triton,
    experts_torch,
    experts_triton,
)
from outpace.kernels.experts_few_packed import experts_few_packed, takes_few_packed
from outpace.kernels.experts_many import Tiles, experts_many
from outpace.kernels.packed_gemv import words_of_chunk
from tests.kernels.packing import random_packed
from tests.kernels.test_experts import Call, call_of, check, exact
from tests.kernels.tolerances import on_gpu

# (kind, group, rows that share a scale, with zeros)
FORMS = [
    ("int8", 10**6, 1, False),
    ("int8", 32, 1, True),
    ("int4", 32, 1, False),
    ("int4", 6, 1, True),
    ("int4", 10**6, 1, True),
    ("fp8", 10**6, 1, False),
    ("fp8", 32, 4, False),
]
DTYPES = [torch.float32, torch.bfloat16]
SHAPE = (4, 2, 3, 40, 36)  # tokens, experts of one, experts, hidden, inner
WIDE = {"block_n": 16, "block_k": 32, "num_warps": 1}  # the default tiles make many programs, slow in the interpreter


def packed_call(
    form: tuple[str, int, int, bool], dtype: torch.dtype, device: torch.device, *, shape: Any = SHAPE, **options: Any
) -> tuple[Call, dict[str, Any]]:
    """A call with the weights that quantized ones stand for, and the quantized ones."""
    kind, group, block, zero = form
    call = call_of(shape, dtype, device, **options)
    stacks: dict[str, Any] = {}
    for name in ("gate_up", "down"):
        experts, rows, columns = getattr(call, name).shape
        stacks[name] = random_packed(
            kind, (rows, columns), min(group, columns), min(block, rows), experts=experts, zero=zero, device=device
        )
    plain: dict[str, Any] = {name: stack.dequantized(torch.float32) for name, stack in stacks.items()}
    return replace(call, **plain), stacks


def run(experts: Any, call: Call, stacks: dict[str, Any], **more: Any) -> torch.Tensor:
    """The call with the quantized weights."""
    return replace(call, **stacks).run(experts, **more)


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernels(form: tuple[str, int, int, bool], dtype: torch.dtype, device: torch.device) -> None:
    options: list[dict[str, Any]] = [{}, {"bias": True, "limit": 1.0, "alpha": 1.7}, {"gated": False}]
    if device.type == "cpu":  # slow in the interpreter: in turns, so that every kind of weight has all of them
        options = [options[(FORMS.index(form) + DTYPES.index(dtype)) % 3]]
    for more in options:
        call, stacks = packed_call(form, dtype, device, **more)
        call.chosen[0, 0] = -1
        tiles = Tiles(16, 32, 16, 32, num_stages=2)
        check(run(experts_many, call, stacks, tiles=tiles), exact(call))
        if takes_few_packed(*stacks.values()):
            check(run(experts_few_packed, call, stacks, up=WIDE, down_tiles=WIDE), exact(call))


@pytest.mark.parametrize("form", [FORMS[1], ("int4", 16, 1, True)], ids=str)
def test_few_tokens_whose_values_are_read_as_words(form: tuple[str, int, int, bool], device: torch.device) -> None:
    """Where they lie at multiples of 16 bytes, with x of 16 bits."""
    call, stacks = packed_call(form, torch.bfloat16, device, bias=True, shape=(1, 2, 3, 32, 32))
    stacks = {name: replace(stack, values=stack.values.contiguous()) for name, stack in stacks.items()}
    call.chosen[0, 0] = -1
    assert all(words_of_chunk(stack, torch.bfloat16) for stack in stacks.values())
    check(run(experts_few_packed, call, stacks), exact(call))


@pytest.mark.parametrize("experts", [experts_in_turn, experts_torch, experts_invariant_torch])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_references(form: tuple[str, int, int, bool], experts: Any) -> None:
    call, stacks = packed_call(form, torch.float32, torch.device("cpu"), bias=True)
    assert torch.equal(run(experts, call, stacks), call.run(experts))


@pytest.mark.usefixtures("left_to_right")
def test_one_of_the_two_may_be_plain_and_one_token_is_enough(device: torch.device) -> None:
    call, stacks = packed_call(FORMS[2], torch.float32, device, shape=(2, 2, 4, 40, 10))
    givens: list[dict[str, Any]] = [{"gate_up": stacks["gate_up"]}, {"down": stacks["down"]}, stacks]
    for given in givens:
        one = replace(call, **given).part(slice(0, 1))
        check(one.run(experts_triton), exact(call.part(slice(0, 1))))
        add = torch.randn(1, 40, device=device)
        want = exact(call.part(slice(0, 1))) + add.double()
        check(one.run(experts_triton, add=add, out=add), want)


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("form", [FORMS[1], FORMS[2]], ids=str)
def test_no_token_depends_on_another(form: tuple[str, int, int, bool], device: torch.device) -> None:
    call, stacks = packed_call(form, torch.float32, device)
    both = run(experts_invariant_triton, call, stacks)
    for token in range(len(call.x)):
        alone = run(experts_invariant_triton, call.part(slice(token, token + 1)), stacks)
        assert torch.equal(alone, both[token : token + 1])


@pytest.mark.parametrize("form", [FORMS[0], FORMS[5], FORMS[6]], ids=str)
def test_rounded_rows(form: tuple[str, int, int, bool], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of int8 and fp8, like the weights; what does not depend on the batch, and few rows, are not rounded."""
    monkeypatch.setattr("outpace.kernels.experts.ROUNDED_ROWS", 2)
    monkeypatch.setattr("outpace.kernels.experts_many.rounded_tiles", lambda: Tiles(16, 32, 16, 32, num_stages=2))
    call, stacks = packed_call(form, torch.float32, device, bias=True, limit=1.0, alpha=1.7)
    call.chosen[0, 0] = -1
    want, plain = run(experts_in_turn, call, stacks, rows=form[0]), exact(call)
    assert (want - plain).abs().max() > 1e-3
    torch.testing.assert_close(run(experts_triton, call, stacks, rows=form[0]), want, rtol=1e-4, atol=1e-4)
    check(run(experts_invariant_triton, call, stacks, rows=form[0]), plain)
    check(run(experts_torch, call, stacks, rows=form[0]), plain)
    check(run(experts_triton, call.part(slice(0, 1)), stacks, rows=form[0]), plain[:1])


def test_what_they_refuse(device: torch.device) -> None:
    call, stacks = packed_call(FORMS[0], torch.float32, device)
    with pytest.raises(AssertionError, match="no stack"):
        replace(call, gate_up=stacks["gate_up"][0]).run(experts_triton)
    with pytest.raises(AssertionError):
        replace(call, gate_up=stacks["down"]).run(experts_triton)
    with pytest.raises(AssertionError, match="do not take fp8 rows"):
        run(experts_many, call, stacks, rows="fp8")


@on_gpu
@pytest.mark.parametrize("form", [FORMS[0], ("int4", 128, 1, False), ("fp8", 128, 128, False)], ids=str)
def test_a_qwen_on_a_gpu(form: tuple[str, int, int, bool], device: torch.device) -> None:
    """The default tiles at real widths in bf16."""
    kind, group, block, zero = form
    for tokens in (1, 16, 200):
        call = call_of((tokens, 8, 16, 2048, 768), torch.bfloat16, device)
        stacks: dict[str, Any] = {
            name: random_packed(kind, shape, min(group, shape[1]), block, experts=16, zero=zero, device=device)
            for name, shape in (("gate_up", (1536, 2048)), ("down", (2048, 768)))
        }
        plain: dict[str, Any] = {name: stack.dequantized(torch.float32) for name, stack in stacks.items()}
        call = replace(call, **plain)
        check(run(experts_triton, call, stacks), exact(call))
        if kind != "int4":  # with the default tiles; a value at the border between two steps may go either way
            found, want = (run(op, call, stacks, rows=kind).double() for op in (experts_many, experts_in_turn))
            assert (found - exact(call)).norm() <= 1.1 * (want - exact(call)).norm()
