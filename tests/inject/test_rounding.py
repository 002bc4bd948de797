"""Norms in bfloat16 round where the model's own do, to the last bit."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outpace.inject.make import make_norm
from outpace.inject.policies import by_class
from outpace.kernels.dispatch import choose_kernels
from tests.inject.checks import CPU, randomised

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = (
    "Llama", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Mixtral", "GptOss", "Granite", "Cohere", "Starcoder2",
)  # fmt: skip


def norms(family: str) -> list[nn.Module]:
    config: Any = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(**SMALL)
    model = randomised(getattr(transformers, f"{family}ForCausalLM")(config)).to(torch.bfloat16)
    return [module for module in model.modules() if "Norm" in type(module).__name__]


@pytest.mark.parametrize("family", FAMILIES)
def test_norms(family: str) -> None:
    policy, kernels = by_class()[f"{family}DecoderLayer"], choose_kernels(CPU)
    for module in norms(family):
        width = module.get_parameter("weight").shape[-1]
        x = (torch.randn(200, width, generator=torch.Generator().manual_seed(0)) * 3).to(torch.bfloat16)
        assert torch.equal(make_norm(module, policy, kernels)(x), module(x)), type(module).__name__
