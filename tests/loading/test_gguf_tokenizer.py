"""Tokenizers out of GGUF metadata: the published behaviour, checked against what is known of it."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outpace.loading.gguf_tokenizer import build_tokenizer
from tests.loading.tiny import CHATML, MERGES, SPECIAL, TOKENS, VOCAB, token_metadata

TEXTS = [
    "hello world",
    "  two spaces, a tab\tand\r\nlines\n\n\n",
    "I've 1234 apples; you'll have 0.5",
    "naïve café, straße, Ελληνικά, русский",
    "日本語のテキスト 한국어 عربى",
    "👩‍👩‍👧‍👦 🙂🙃 🇫🇷",
    "\x00\x01\x7f control",
    "﷽ 𝕏 \U0010fffd",
    " ",
    "",
]
PIECES = ["▁", *"abcdehilnorstw", "he", "▁t", "▁the", "in", "er", "▁w", "▁wo", "or", "ld", "▁world", "lo", "ll", "hell"]


def byte_level(**changes: Any) -> PreTrainedTokenizerFast:
    metadata = token_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return build_tokenizer({key: value for key, value in metadata.items() if value is not None}, 128, VOCAB)


def sentencepiece(**changes: Any) -> PreTrainedTokenizerFast:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4],
        "scores": [0.0] * 259 + [float(-rank) for rank in range(len(PIECES))] + [0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, 128, len(tokens))


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    found: list[int] = tokenizer(text)["input_ids"]
    return found


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(ids(tokenizer, text)))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2", "default"])
def test_byte_level_round_trip(pre: str, text: str) -> None:
    tokenizer = byte_level(pre=pre, add_bos_token=False)
    assert tokenizer.decode(ids(tokenizer, text)) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_round_trip(prefix: bool, text: str) -> None:
    tokenizer = sentencepiece(add_space_prefix=prefix)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == text


def test_random_unicode_round_trips() -> None:
    dice = random.Random(7)
    tokenizers = (byte_level(), sentencepiece(), sentencepiece(add_space_prefix=False))
    for _ in range(60):
        points = (
            dice.choice((dice.randrange(32, 127), dice.randrange(0xD800), dice.randrange(0xE000, 0x110000)))
            for _ in range(24)
        )
        text = "".join(map(chr, points)).replace("▁", "")
        for tokenizer in tokenizers:
            assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == text


def test_smollm_splits_every_digit_though_a_merge_would_join_them() -> None:
    assert "1234" in TOKENS
    assert pieces(byte_level(), "1234") == ["1", "2", "3", "4"]
    assert pieces(byte_level(pre="gpt-2"), "1234") == ["1234"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "ĠX"]),
        ("gpt-2", ["it", "'s", "Ġ12345", "!!", "ĊĊ", "ĠX"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "!!ĊĊ", "ĠX"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "ĠX"]),
    ],
)
def test_words(pre: str, expected: list[str]) -> None:
    words = byte_level(pre=pre).backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 12345!!\n\n X")
    assert [word for word, _ in words] == expected


def test_only_llama_bpe_takes_a_known_word_whatever_the_merges_say() -> None:
    no_merge_makes_it = MERGES[:-1]  # "1234" is a token still
    assert pieces(byte_level(pre="gpt-2", merges=no_merge_makes_it), "1234") == ["123", "4"]
    assert pieces(byte_level(pre="llama-bpe", merges=["h e", "1 2"], add_bos_token=False), "123") == ["123"]


def test_qwen2_normalizes_as_published() -> None:
    assert ids(byte_level(pre="qwen2"), "e\u0301") == ids(byte_level(pre="qwen2"), "é")
    assert ids(byte_level(pre="smollm"), "e\u0301") != ids(byte_level(pre="smollm"), "é")


def test_special_tokens() -> None:
    tokenizer = byte_level()
    assert ids(tokenizer, "".join(SPECIAL)) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.decode([0, *ids(tokenizer, "hello"), 2], skip_special_tokens=True) == "hello"
    assert tokenizer.model_max_length == 128
    assert len(tokenizer) == len(TOKENS)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["hello"]),
        ({"add_bos_token": True}, ["<|im_start|>", "hello"]),
        ({"add_eos_token": True}, ["hello", "<|im_end|>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|im_start|>", "hello", "<|im_end|>"]),
        ({"pre": "llama-bpe"}, ["<|im_start|>", "hello"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["hello"]),
        ({"pre": "llama-bpe", "bos_token_id": None}, ["hello"]),
    ],
)
def test_begin_and_end(flags: dict[str, Any], expected: list[str]) -> None:
    assert pieces(byte_level(**flags), "hello") == expected


def test_sentencepiece_begins_with_bos_unless_told_not_to() -> None:
    assert pieces(sentencepiece(), "the")[0] == "<s>"
    assert pieces(sentencepiece(add_bos_token=False), "the") == ["▁the"]


def test_user_defined_tokens_are_whole_and_survive_skipping() -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    assert "<tool>" in pieces(tokenizer, "the<tool>")
    assert "<tool>" in tokenizer.decode(ids(tokenizer, "the<tool>"), skip_special_tokens=True)


def test_unknown_characters_become_bytes() -> None:
    assert pieces(sentencepiece(add_bos_token=False, add_space_prefix=False), "é") == ["<0xC3>", "<0xA9>"]


def test_sentencepiece_merges_as_sentencepiece_does() -> None:
    dice = random.Random(3)
    tokenizer = sentencepiece(add_bos_token=False, add_space_prefix=False)
    for _ in range(300):
        text = "".join(dice.choices(" abcdehilnorstw", k=dice.randrange(1, 16)))
        assert pieces(tokenizer, text) == best_first(text.replace(" ", "▁")), text


def best_first(text: str) -> list[str]:
    """SentencePiece's rule: join the neighbours whose union has the best score, the leftmost of equals, until none."""
    parts = list(text)
    while True:
        joins = [
            (PIECES.index(pair), at) for at in range(len(parts) - 1) if (pair := parts[at] + parts[at + 1]) in PIECES
        ]
        if not joins:
            return parts
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_chat_template() -> None:
    tokenizer = byte_level()
    assert tokenizer.chat_template == CHATML
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert again.chat_template == tokenizer.chat_template
    assert again.special_tokens_map == tokenizer.special_tokens_map
