"""Llama, and families whose layer is Llama's except for a few fields.

Mistral, Qwen 2, Qwen 3 (q and k norms), SmolLM 3, Phi 3 and 4 (fused linears), StarCoder 2 (a plain MLP), StableLM,
OLMo (norms without weights), Command R (attention and MLP from one norm).
"""

from dataclasses import replace

from outpace.inject.policy import ModelRoles, Policy

MODEL = ModelRoles(embed="model.embed_tokens", layers="model.layers", norm="model.norm", rotary="model.rotary_emb")
LLAMA = Policy(
    layers=("LlamaDecoderLayer", "MistralDecoderLayer"),
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    model=MODEL,
)

QWEN2 = replace(LLAMA, layers=("Qwen2DecoderLayer",))
QWEN3 = replace(LLAMA, layers=("Qwen3DecoderLayer",), q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
SMOLLM3 = replace(
    LLAMA,
    layers=("SmolLM3DecoderLayer",),
    readers={"rotary": lambda config, index: bool(config.no_rope_layers[index])},
)

PHI3 = replace(LLAMA, layers=("Phi3DecoderLayer",), qkv="self_attn.qkv_proj", up="mlp.gate_up_proj")
STARCODER2 = replace(
    LLAMA,
    layers=("Starcoder2DecoderLayer",),
    norm="layer",
    up="mlp.c_fc",
    gated=False,
    down="mlp.c_proj",
)
STABLELM = replace(
    LLAMA,
    layers=("StableLmDecoderLayer",),
    norm="layer",
    variant=lambda config: {"placement": "parallel", "mlp_norm": None} if config.use_parallel_residual else {},
    refuses=lambda config: "has separate norm weights for each head (qk_layernorm)" if config.qk_layernorm else None,
)
OLMO = replace(LLAMA, layers=("OlmoDecoderLayer",), norm="layer", norm_eps=1e-5)
COHERE = replace(
    LLAMA,
    layers=("CohereDecoderLayer",),
    placement="parallel",
    norm="layer",
    mlp_norm=None,
    interleaved=True,
    model=replace(MODEL, logit_scale=lambda config: config.logit_scale),
    refuses=lambda config: "has separate norm weights for each head (use_qk_norm)" if config.use_qk_norm else None,
)
COHERE2 = replace(
    COHERE,
    layers=("Cohere2DecoderLayer",),
    readers={"rotary": lambda config, index: config.layer_types[index] == "sliding_attention"},
    refuses=lambda config: None,
)

POLICIES = (LLAMA, QWEN2, QWEN3, SMOLLM3, PHI3, STARCODER2, STABLELM, OLMO, COHERE, COHERE2)
