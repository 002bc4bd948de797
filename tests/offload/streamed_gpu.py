"""Streamed layers on a GPU."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace import LLM, SamplingParams

SAME: dict[str, Any] = {"enable_prefix_caching": False}  # the second time the same tokens run in the same steps
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=2)


def texts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in (5, 40, 17, 90)]


def answers(llm: LLM, vocab: int) -> list[Any]:
    outputs = llm.generate(texts(vocab), PARAMS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def llama(layers: int = 9) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def answers_short(llm: LLM, vocab: int) -> list[Any]:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
    outputs = llm.generate([text[:20] for text in texts(vocab)], params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]
