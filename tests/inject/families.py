"""Tiny models of every family that a policy knows: each case is one variant that its config can say."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf

from tests.inject.checks import randomised

VOCAB = 97
Options = Mapping[str, Any]
_TOKENS: Options = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1}
_ENDS: Options = {**_TOKENS, "eos_token_id": 2}  # some rows of a batch end before the others
_ENDLESS: Options = {**_TOKENS, "eos_token_id": None}

_GROUPED: Options = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_LLAMA: Options = {**_GROUPED, **_ENDS}
_NEWER: Options = {**_GROUPED, **_ENDLESS}
_UNTIED: Options = {**_NEWER, "tie_word_embeddings": False}
_GPT: Options = {**_ENDS, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}
_FOUR_HEADS: Options = {
    **_ENDS, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
_STABLELM: Options = {**_FOUR_HEADS, "num_attention_heads": 6, "num_key_value_heads": 2}
_GPT_NEO: Options = {
    **_ENDS, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 128,
    "attention_types": [[["global", "local"], 2]], "window_size": 5,
}  # fmt: skip
_GRANITE: Options = {
    **_UNTIED, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
    "logits_scaling": 5.0,
}  # fmt: skip
_FALCON: Options = {
    **_ENDS, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 128,
}  # fmt: skip
_BLOOM: Options = {**_ENDS, "hidden_size": 48, "n_layer": 3, "n_head": 4}
_MPT: Options = {**_ENDS, "d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "use_cache": True}
_OPT: Options = {**_FOUR_HEADS, "ffn_dim": 80, "word_embed_proj_dim": 48}
_COHERE: Options = {**_UNTIED, "logit_scale": 0.4}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: Options = {**_UNTIED, "head_dim": 16}
GEMMA_TABLES: Options = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA3: Options = {
    "sliding_window": 5, "query_pre_attn_scalar": 10, "layer_types": _KINDS, "rope_parameters": GEMMA_TABLES,
}  # fmt: skip
_GEMMA2: Options = {  # sdpa, the default in Transformers 5.17, drops the cap
    **_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 10, "attn_implementation": "eager",
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}


def longrope(original: int, pairs: int = 4) -> Options:
    """Options of a Phi-3 whose frequencies change beyond `original` positions."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [3.0 + i for i in range(pairs)],
    }  # fmt: skip
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


FAMILIES: Mapping[str, tuple[Options, Mapping[str, Options]]] = {
    "Llama": (_LLAMA, {
        "grouped keys": {},
        "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
        "llama3 rope, tied": {"rope_parameters": _LLAMA3, "tie_word_embeddings": True},
        "yarn": {"rope_parameters": _YARN},
        "linear rope, all key heads": {"rope_parameters": _LINEAR, "num_key_value_heads": 6},
    }),
    "Mistral": (_LLAMA, {"window": {"sliding_window": 5}, "full": {"sliding_window": None}}),
    "Qwen2": (_LLAMA, {
        "full": {}, "windows": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    }),
    "Qwen3": (_LLAMA, {"wide heads": {"head_dim": 16}, "one key head": {"head_dim": 8, "num_key_value_heads": 1}}),
    "SmolLM3": (_LLAMA, {"some rope": {}, "all rope": {"no_rope_layers": [1, 1, 1]}}),
    "GPT2": (_GPT, {
        "scaled": {},
        "untied, scale by layer": {
            "n_head": 3, "n_inner": 40, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True,
        },
        "unscaled, relu": {"scale_attn_weights": False, "activation_function": "relu", "n_embd": 36},
    }),
    "GPTBigCode": (_GPT, {
        "one key head": {}, "all key heads, untied": {"multi_query": False, "n_embd": 36, "tie_word_embeddings": False},
    }),
    "GPTJ": ({**_GPT, "rotary_dim": 8}, {
        "part rotated": {},
        "tied, whole heads": {"tie_word_embeddings": True, "rotary_dim": 12},
        "odd heads": {"n_embd": 45, "n_head": 3, "rotary_dim": 6, "n_inner": 70},
    }),
    "CodeGen": ({**_GPT, "rotary_dim": 8}, {
        "untied": {"tie_word_embeddings": False}, "eight heads": {"n_head": 8, "rotary_dim": 4},
    }),
    "GPTNeo": (_GPT_NEO, {
        "alternating": {},
        "local only, untied": {
            "attention_types": [[["local"], 4]], "window_size": 3, "tie_word_embeddings": False, "num_heads": 3,
        },
        "global only, odd heads": {
            "attention_types": [[["global"], 4]], "hidden_size": 35, "num_heads": 5, "intermediate_size": 50,
        },
    }),
    "GPTNeoX": (_FOUR_HEADS, {
        "parallel, part rotated": {"rotary_pct": 0.5},
        "one after the other": {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
        "no biases, tied": {
            "attention_bias": False, "tie_word_embeddings": True, "hidden_size": 54, "num_attention_heads": 3,
        },
    }),
    "Persimmon": (_FOUR_HEADS, {"q and k norms": {}, "no q and k norms": {"qk_layernorm": False}}),
    "Phi": (_FOUR_HEADS, {
        "half rotated": {"partial_rotary_factor": 0.5},
        "grouped keys, tied": {
            "num_key_value_heads": 2, "tie_word_embeddings": True, "partial_rotary_factor": 0.4, "hidden_size": 60,
        },
        "q and k norms": {"qk_layernorm": True},
    }),
    "Phi3": (_NEWER, {
        "grouped keys": {},
        "partial": {"rope_parameters": _PARTIAL, "num_key_value_heads": 6},
        "partial, odd head": {"rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.4}, "hidden_size": 60},
        "window": {"sliding_window": 5, "num_key_value_heads": 1},
        "longrope": longrope(128),
        "longrope, window": {**longrope(100), "sliding_window": 6, "tie_word_embeddings": True},
    }),
    "StableLm": (_STABLELM, {
        "one after the other": {"partial_rotary_factor": 0.25},
        "parallel, biases": {
            "use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "hidden_size": 72,
        },
    }),
    "Olmo": (_STABLELM, {
        "plain": {}, "clipped, biases, tied": {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True},
    }),
    "Starcoder2": (_NEWER, {
        "grouped keys": {},
        "window, no biases": {"sliding_window": 5, "use_bias": False, "num_key_value_heads": 1},
        "all key heads, untied": {"num_key_value_heads": 6, "tie_word_embeddings": False, "hidden_size": 60},
    }),
    "OPT": (_OPT, {
        "125m": {},
        "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
        "350m as wide as its words": {"do_layer_norm_before": False},
        "no biases, bare norms": {
            "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu",
        },
        "narrow words, untied, no last norm": {
            "word_embed_proj_dim": 24, "tie_word_embeddings": False, "_remove_final_layer_norm": True,
            "hidden_size": 45, "num_attention_heads": 5,
        },
    }),
    "Bloom": (_BLOOM, {
        "four heads": {},
        "six heads": {"n_head": 6},
        "eleven odd heads, untied": {"n_head": 11, "hidden_size": 55, "tie_word_embeddings": False},
        "residual behind the norm": {"apply_residual_connection_post_layernorm": True},
    }),
    "Mpt": (_MPT, {
        "four heads": {},
        "six heads, clipped, untied": {"n_heads": 6, "attn_config": {"clip_qkv": 0.8}, "tie_word_embeddings": False},
        "eleven odd heads, scaled": {"n_heads": 11, "d_model": 55, "attn_config": {"softmax_scale": 0.3}},
    }),
    "Falcon": (_FALCON, {
        "7b": {},
        "7b biases, untied": {"bias": True, "tie_word_embeddings": False, "num_attention_heads": 4},
        "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "11b, one norm": {
            "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 70,
        },
        "rw": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        "rw, one key head, side by side": {"alibi": True, "num_attention_heads": 8},
        "all key heads": {"multi_query": False, "parallel_attn": False},
    }),
    "Gemma": (_GEMMA, {
        "tied": {"tie_word_embeddings": True},
        "one key head, biases": {"num_key_value_heads": 1, "head_dim": 20, "attention_bias": True},
    }),
    "Gemma2": (_GEMMA2, {
        "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 20},
        "full first": {
            "layer_types": ["full_attention", *_KINDS[:2]], "attention_bias": True, "num_key_value_heads": 6,
        },
    }),
    "Gemma3": (_GEMMA, {
        "untied": GEMMA3,
        "tied": {**GEMMA3, "tie_word_embeddings": True},
        "caps": {**GEMMA3, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5, "head_dim": 20},
        "one key head, default layers": {
            "sliding_window": 4, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True,
        },
    }),
    "Cohere": (_COHERE, {
        "untied": {}, "biases, tied": {"attention_bias": True, "tie_word_embeddings": True, "hidden_size": 60},
    }),
    "Cohere2": (_COHERE, {
        "full second": {"layer_types": _KINDS, "sliding_window": 5},
        "full first, one key head": {
            "layer_types": _KINDS[1:] + _KINDS[:1], "sliding_window": 7, "num_key_value_heads": 1,
            "attention_bias": True,
        },
    }),
    "Granite": (_GRANITE, {
        "grouped keys": {},
        "biases, one key head": {
            "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "hidden_size": 60,
        },
    }),
}  # fmt: skip
CASES = [(family, case) for family, (_, cases) in FAMILIES.items() for case in cases]


def made(family: str, options: Options) -> Any:
    """A model of a class of Transformers, with the same weights at every call."""
    with warnings.catch_warnings(action="ignore"):  # GPT-BigCode scripts functions when it is imported
        config = getattr(hf, f"{family}TextConfig", None) or getattr(hf, f"{family}Config")
        kind = getattr(hf, f"{family}ForCausalLM", None) or getattr(hf, f"{family}LMHeadModel")
    torch.manual_seed(0)
    return randomised(kind(config(**options)))


def family_model(family: str, case: str | None = None, **changes: Any) -> Any:
    """The model of a case, or of what its cases have in common."""
    base, cases = FAMILIES[family]
    return made(family, {**base, **(cases[case] if case else {}), **changes})
