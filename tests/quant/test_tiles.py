"""Weights in groups on a CPU through the public face: they are put in tiles once, and the model stays the same."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import outpace
from outpace.inject.quantized import PackedLinear
from outpace.kernels.dispatch import choose_kernels
from outpace.kernels.packed import Packed
from outpace.kernels.packed_linear import packed_linear_invariant_torch, packed_linear_tiles
from outpace.kernels.packed_tiles import MOST_ROWS, TiledWeight, takes_tiles
from tests.kernels.packing import random_packed
from tests.models import PAD, VOCAB, prompts

pytestmark = pytest.mark.skipif(
    not takes_tiles(random_packed("int4", (64, 64), 32)), reason="torch has no such tiles on this CPU"
)
GROUPS: dict[str, dict[str, Any]] = {
    "int4": {"scheme": "int4"},
    "int4, asymmetric": {"weight": {"num_bits": 4, "group_size": 32, "q_type": "asymmetric"}},
    "int8": {"weight": {"group_size": 32}},
}


def wide() -> Any:
    """A model whose linears have rows enough for tiles."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = hf.LlamaConfig(vocab_size=VOCAB, pad_token_id=PAD, bos_token_id=2, eos_token_id=None, **sizes)
    return hf.LlamaForCausalLM(config).eval()


def engine(quant: dict[str, Any], **options: Any) -> Any:
    return outpace.init_inference(wide(), device="cpu", dtype="fp32", kernel_inject=True, quant=quant, **options)


def linears(model: Any) -> list[PackedLinear]:
    return [module for module in model.module.modules() if isinstance(module, PackedLinear)]


def logits(model: Any, rows: int) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=prompts(rows)[0][None]).logits
    return found


@pytest.mark.parametrize("kind", GROUPS)
def test_the_model_is_the_same_in_tiles(kind: str) -> None:
    tiled, exact = engine(GROUPS[kind]), engine(GROUPS[kind], kernels={"packed_linear": "torch"})
    bytes_before = sum(each.weight.nbytes for each in linears(tiled))
    for rows in (1, 7, MOST_ROWS[1] + 3):
        found, want = logits(tiled, rows), logits(exact, rows)
        assert (found - want).norm() <= 0.02 * want.norm()
    assert sum(isinstance(each.packed, TiledWeight) for each in linears(tiled)) >= 8, "all but the head"
    assert all(isinstance(each.packed, Packed) for each in linears(exact))
    assert sum(each.weight.nbytes for each in linears(tiled)) == bytes_before
    again = copy.deepcopy(tiled.module)
    with torch.inference_mode():
        ids = prompts(5)[0][None]
        assert torch.equal(again(input_ids=ids).logits, tiled(input_ids=ids).logits)


def test_deterministic_stays_out_of_tiles() -> None:
    assert choose_kernels(torch.device("cpu")).packed_linear is packed_linear_tiles
    assert choose_kernels(torch.device("cpu"), deterministic=True).packed_linear is packed_linear_invariant_torch


def test_a_weight_that_two_linears_share_is_put_in_tiles_once() -> None:
    found = engine(GROUPS["int4"])
    one, other = [each for each in linears(found) if each.weight.shape == linears(found)[0].weight.shape][:2]
    other.weight, other.weight_scale = one.weight, one.weight_scale
    x = torch.randn(3, one.in_features)
    assert torch.equal(one(x), other(x))
    assert one.weight is other.weight
