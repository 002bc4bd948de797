"""Promise 1: what the engine computes is what plain Hugging Face computes, in float32, token for token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from tests.models import PAD, padded, prompts, tiny

DECODERS = ("llama", "qwen3", "gemma3", "gpt2", "opt", "bloom", "gpt_neox", "mixtral")
LENGTHS = (9, 5, 2)
NEW = 18
SCORES: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True} | {
    "output_logits": True
}

CHATS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about a cat that wanted to learn how to swim in the sea.",
)


def engine_of(model: Any) -> outpace.InferenceEngine:
    return outpace.init_inference(model, dtype="fp32", device="cpu")


def features() -> torch.Tensor:
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))  # [batch, mels, frames]


def generated(model: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences [batch, length] and the logits of each step [steps, batch, vocabulary]."""
    output = model.generate(**inputs, **SCORES)
    return output.sequences, torch.stack(output.logits)


@torch.no_grad()
def one_at_a_time(model: Any, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens and their logits as plain Hugging Face gives them for each prompt alone, without padding."""
    single = [generated(model, input_ids=row[None], attention_mask=torch.ones_like(row[None])) for row in rows]
    new = torch.cat([sequence[:, len(row) :] for row, (sequence, _) in zip(rows, single, strict=True)])
    return new, torch.cat([logits for _, logits in single], dim=1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, "bert"])
def test_forward_of_a_padded_batch_is_bitwise_equal(family: str, side: str) -> None:
    batch = padded(prompts(*LENGTHS), side)
    with torch.no_grad():
        expected = tiny(family)(**batch).logits

    output = engine_of(tiny(family))(**batch)

    assert torch.equal(output.logits, expected)
    assert not output.logits.requires_grad


def test_forward_of_t5_and_whisper_is_bitwise_equal() -> None:
    start = torch.tensor([[PAD, 7, 8], [PAD, 9, 4]])
    inputs = {"t5": padded(prompts(6, 4), "right"), "whisper": {"input_features": features()}}
    for family, given in inputs.items():
        with torch.no_grad():
            expected = tiny(family)(**given, decoder_input_ids=start).logits
        assert torch.equal(engine_of(tiny(family))(**given, decoder_input_ids=start).logits, expected), family


@pytest.mark.parametrize("family", DECODERS)
def test_greedy_of_a_left_padded_batch(family: str) -> None:
    batch = padded(prompts(*LENGTHS), "left")
    expected, expected_logits = generated(tiny(family), **batch)

    tokens, logits = generated(engine_of(tiny(family)), **batch)

    assert torch.equal(tokens, expected)
    assert tokens.shape == (3, 9 + NEW)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", DECODERS)
def test_greedy_of_a_right_padded_batch_is_that_of_each_prompt_alone(family: str) -> None:
    rows = prompts(*LENGTHS)
    batch = padded(rows, "right")
    expected, expected_logits = one_at_a_time(tiny(family), rows)

    tokens, logits = generated(engine_of(tiny(family)), **batch)

    assert torch.equal(tokens[:, :9], batch["input_ids"]), "the caller's prompt block is not kept"
    assert torch.equal(tokens[:, 9:], expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_right_padding_is_seen_without_a_mask_where_hugging_face_sees_it(family: str) -> None:
    rows = prompts(*LENGTHS)
    ids = padded(rows, "right")["input_ids"]
    expected, _ = one_at_a_time(tiny(family), rows)

    tokens = engine_of(tiny(family)).generate(ids, max_new_tokens=NEW, do_sample=False)

    assert torch.equal(tokens, torch.cat([ids, expected], dim=1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_of_t5(side: str) -> None:
    batch = padded(prompts(*LENGTHS), side)
    expected, expected_logits = generated(tiny("t5"), **batch)

    tokens, logits = generated(engine_of(tiny("t5")), **batch)

    assert torch.equal(tokens, expected)
    assert torch.equal(logits, expected_logits)
    alone, _ = generated(tiny("t5"), input_ids=prompts(*LENGTHS)[2][None])
    assert torch.equal(tokens[2:], alone), "padding changes the answer"


def test_greedy_of_whisper() -> None:
    expected = tiny("whisper").generate(features(), max_new_tokens=NEW, do_sample=False)

    tokens = engine_of(tiny("whisper")).generate(features(), max_new_tokens=NEW, do_sample=False)

    assert torch.equal(tokens, expected)
    assert tokens.shape[1] >= NEW


@pytest.fixture(scope="module")
def smollm(default_model_folder: Path) -> tuple[Any, Any, list[torch.Tensor]]:
    model: Any = AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model_folder)
    rows = []
    for text in CHATS:
        message = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        rows.append(torch.tensor(encoded["input_ids"]))
    return model, tokenizer, rows


@pytest.mark.real
def test_real_weights_on_chat_prompts_padded_on_either_side(
    smollm: tuple[Any, Any, list[torch.Tensor]],
) -> None:
    model, tokenizer, rows = smollm
    greedy: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    pad = int(tokenizer.pad_token_id)
    left, right = padded(rows, "left", pad), padded(rows, "right", pad)
    width = left["input_ids"].shape[1]
    expected = model.generate(**left, **greedy)  # before the engine gets the module
    alone = torch.cat([model.generate(input_ids=row[None], **greedy)[:, len(row) :] for row in rows])
    with torch.no_grad():
        logits = model(**left).logits

    engine = engine_of(model)

    assert torch.equal(engine(**left).logits, logits)
    assert torch.equal(engine.generate(**left, **greedy), expected)
    assert torch.equal(engine.generate(**right, **greedy), torch.cat([right["input_ids"], alone], dim=1))
    assert torch.equal(expected[:, width:], alone)
    assert "Paris" in tokenizer.decode(alone[0])
