"""The real default model: it is the one that was published, and it works."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.loading.build import Loaded, load
from outpace.loading.dtypes import native_on_cpu
from tests.texts import TEXT

pytestmark = pytest.mark.real

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def encode(smollm: Loaded, text: str) -> list[int]:
    assert smollm.tokenizer is not None
    found: list[int] = smollm.tokenizer(text)["input_ids"]
    return found


def perplexity(loaded: Loaded) -> float:
    ids = torch.tensor([encode(loaded, TEXT)])
    with torch.inference_mode():
        logits = loaded.model(ids).logits[0, :-1].float()
    return math.exp(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())


def test_perplexity(smollm: Loaded) -> None:
    assert perplexity(smollm) < 29.7  # measured 28.27


def test_it_knows_the_capital_of_france(smollm: Loaded) -> None:
    assert smollm.tokenizer is not None
    inputs: Any = smollm.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = smollm.model
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in smollm.tokenizer.decode(output)
    assert output[-1] == 2  # it stops by itself


def test_float16_has_room_for_the_activations(smollm: Loaded) -> None:
    """The first position of layer 11 carries the largest: 22,547 here, 30,755 over all 49,152 first tokens."""
    model: Any = smollm.model
    with torch.inference_mode():
        states = model(torch.tensor([encode(smollm, TEXT)]), output_hidden_states=True).hidden_states
    assert 20_000 < max(float(state.abs().max()) for state in states) < torch.finfo(torch.float16).max / 2


def test_what_runs_by_default(default_model_folder: Path) -> None:
    loaded = load(default_model_folder, device=torch.device("cpu"))
    assert loaded.dtype == (torch.float16 if native_on_cpu(torch.float16) else torch.float32)
    assert "float16" in loaded.dtype_reason


def test_special_tokens(smollm: Loaded) -> None:
    tokenizer = smollm.tokenizer
    assert tokenizer is not None
    assert encode(smollm, "<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)


def test_every_digit_is_a_token(smollm: Loaded) -> None:
    assert encode(smollm, "1234") == [33, 34, 35, 36]
    assert encode(smollm, "Hello world") == [19556, 905]
    assert smollm.tokenizer is not None
    pieces = smollm.tokenizer.convert_ids_to_tokens(encode(smollm, "in 2024, 3.14"))
    assert [piece for piece in pieces if piece.isdigit()] == list("2024314")


@pytest.mark.parametrize("text", ["I've 12,345 🙂 émojis\n\n\tdef f(x):  return x", "日本語 👩‍👩‍👧‍👦 𝕏", TEXT])
def test_round_trip(smollm: Loaded, text: str) -> None:
    assert smollm.tokenizer is not None
    assert smollm.tokenizer.decode(encode(smollm, text)) == text


def test_chat_template_is_the_published_one(smollm: Loaded) -> None:
    assert smollm.tokenizer is not None
    text = smollm.tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    user = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert text == f"{SYSTEM}{user}<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Be brief."}, *QUESTION]
    text = smollm.tokenizer.apply_chat_template(own, tokenize=False)
    assert text == f"<|im_start|>system\nBe brief.<|im_end|>\n{user}"
