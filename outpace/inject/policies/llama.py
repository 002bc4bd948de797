"""Llama, and the families whose layer is Llama's: Mistral, Qwen2, Qwen3 (q and k norms), SmolLM3."""

from dataclasses import replace

from outpace.inject.policy import ModelRoles, Policy

LLAMA = Policy(
    layers=("LlamaDecoderLayer", "MistralDecoderLayer"),
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    model=ModelRoles(embed="model.embed_tokens", layers="model.layers", norm="model.norm", rotary="model.rotary_emb"),
)

QWEN2 = replace(LLAMA, layers=("Qwen2DecoderLayer",))
QWEN3 = replace(LLAMA, layers=("Qwen3DecoderLayer",), q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
SMOLLM3 = replace(
    LLAMA,
    layers=("SmolLM3DecoderLayer",),
    readers={"rotary": lambda config, index: bool(config.no_rope_layers[index])},
)

POLICIES = (LLAMA, QWEN2, QWEN3, SMOLLM3)
