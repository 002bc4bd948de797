"""Tiny random models by family, made in memory: the same family gives the same weights every time.

Because they are the same every time, `tiny("llama")` is the untouched reference of an engine that changed another
`tiny("llama")` in place.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 97
POSITIONS = 64
PAD = 1

_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": None,
}
_OLD: Mapping[str, Any] = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
_HEAD_8: Mapping[str, Any] = {**_DECODER, "head_dim": 8}

FAMILIES: Mapping[str, tuple[type[PreTrainedModel], Callable[..., Any], Mapping[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, _DECODER),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, _HEAD_8),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**_HEAD_8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "pad_token_id": PAD}
        | {"bos_token_id": 2, "eos_token_id": None},
    ),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, {**_OLD, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": (
        hf.BloomForCausalLM,
        hf.BloomConfig,
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": PAD, "eos_token_id": None},
    ),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, _OLD),
    "falcon": (hf.FalconForCausalLM, hf.FalconConfig, {**_OLD, "new_decoder_architecture": False}),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**_DECODER, "num_local_experts": 4}),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": PAD, "eos_token_id": None, "decoder_start_token_id": PAD},
    ),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, {**_OLD, "pad_token_id": PAD}),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        {"vocab_size": VOCAB, "d_model": 32, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"max_source_positions": 16, "max_target_positions": POSITIONS, "pad_token_id": PAD, "bos_token_id": 2}
        | {"eos_token_id": None, "decoder_start_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}


def tiny(family: str, *, weights_seed: int = 0, **changes: Any) -> Any:
    """A PreTrainedModel of a few thousand random weights, in eval mode, with the same weights at every call.

    Any, because the hints of PreTrainedModel do not know `generate`.
    """
    model_class, config_class, options = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(weights_seed)
        model = model_class(config_class(**{**options, **changes}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # wide, so that the likeliest token keeps changing
                embedding = any(part in name for part in ("embed", "shared", "wte", "wpe"))
                parameter.add_((0.5 if parameter.dim() > 1 and not embedding else 0.1) * torch.randn(parameter.shape))
    return model.eval()


def prompts(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Random prompts of these lengths, each [length], without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in lengths]


def padded(rows: list[torch.Tensor], side: str, pad: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts as one batch, padded on one side."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[number, place] = row
        mask[number, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


CYCLE = "world é日😀!ENDx"
"""What the chain model says, over and over: no byte of it occurs twice, so each byte has one successor."""
CHAT = (
    "{% if tools %}{{ tools | length }} tools;{% endif %}{% if documents %}{{ documents | length }} texts;{% endif %}"
    "{% for message in messages %}{{ message['role'] + '=' + message['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant=' }}{% endif %}"
)
END = "<|end|>"


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, and one special token that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(token_models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = CHAT if chat else None
    return wrapped


def chain_model(tokenizer: PreTrainedTokenizerFast, text: str = CYCLE) -> Any:
    """A Llama that says `text` and then the end token, and begins again; after any other token it begins.

    Its layers add nothing, its embedding is the identity and its head is the table of successors.
    """
    size = len(tokenizer)
    width = -(-size // 4) * 4
    ring = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert len(set(ring)) == len(ring), "a byte occurs twice"
    config = hf.LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = hf.LlamaForCausalLM(config).eval()
    successor = dict.fromkeys(range(size), ring[0]) | dict(zip(ring, ring[1:] + ring[:1], strict=True))
    with torch.no_grad():
        for weight in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        model.lm_head.weight[[successor[token] for token in range(size)], range(size)] = 1.0
    return model
