"""Mixtures of experts around a fused attention: Mixtral, Qwen2-MoE, Qwen3-MoE, GPT-OSS. Their MLPs stay as they are."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA, QWEN3

MIXTRAL = replace(LLAMA, layers=("MixtralDecoderLayer", "Qwen2MoeDecoderLayer"), up=None, down=None, mlp="mlp")
QWEN3_MOE = replace(QWEN3, layers=("Qwen3MoeDecoderLayer",), up=None, down=None, mlp="mlp")
GPT_OSS = replace(
    MIXTRAL,
    layers=("GptOssDecoderLayer",),
    round_before_weight=False,
    sinks="self_attn.sinks",
    rotary_twice=False,
)

POLICIES = (MIXTRAL, QWEN3_MOE, GPT_OSS)
