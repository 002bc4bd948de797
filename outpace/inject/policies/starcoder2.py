"""StarCoder 2: Llama's attention with biases, layer norms and a plain MLP."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA

STARCODER2 = replace(
    LLAMA,
    layers=("Starcoder2DecoderLayer",),
    norm="layer",
    up="mlp.c_fc",
    gated=False,
    down="mlp.c_proj",
)

POLICIES = (STARCODER2,)
