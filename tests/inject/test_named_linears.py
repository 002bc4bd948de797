"""DeepSpeed's form of an injection policy: linears by the ends of their paths, in the layers that have them."""

import re
from typing import Any

import pytest
import torch
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

import outpace
from outpace import ModelError
from tests.models import prompts, tiny


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "layer", "names"),
    [
        ("t5", T5Block, ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")),
        ("opt", OPTDecoderLayer, ("self_attn.out_proj", ".fc2")),
        ("bert", BertLayer, "output.dense"),
    ],
)
def test_item_25_deepspeeds_policies_name_linears_by_the_ends_of_their_paths(
    family: str, layer: type[torch.nn.Module], names: Any
) -> None:
    ids = prompts(7)[0][None]
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if family == "t5" else {"input_ids": ids}
    engine = outpace.init_inference(tiny(family), device="cpu", dtype="fp32", injection_policy={layer: names})
    assert torch.equal(engine(**inputs).logits, tiny(family)(**inputs).logits)
    first = names if isinstance(names, str) else names[0]
    for wrong in (f"{first}x", first[1:], f"x{first}"):
        with pytest.raises(ModelError, match=f"injection: {layer.__name__} has no '{re.escape(wrong)}'; nearest: "):
            outpace.init_inference(tiny(family), device="cpu", injection_policy={layer: (wrong,)})
