"""The default model, injected: its answers are those of plain Hugging Face, token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from tests.texts import QUESTIONS


@pytest.mark.real
def test_ten_answers_are_the_same(default_model_folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model_folder, padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    plain: Any = AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32)
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = plain.generate(**inputs, **options)
    with outpace.init_inference(plain, kernel_inject=True, dtype=torch.float32, device="cpu") as engine:
        assert torch.equal(engine.generate(**inputs, **options), expected)
