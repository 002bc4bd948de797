"""Text from tokens as they come: characters of several bytes, special tokens, stop strings."""

import itertools

import pytest
from transformers import PreTrainedTokenizerFast

from outpace.tokenizer import Detokenizer
from tests.models import END

TEXTS = (
    "plain ascii",
    "é ü ß ñ",
    "日本語のテキスト",
    "한국어",
    "😀👍🏽 emoji 👨‍👩‍👧 family",
    "mixed: naïve 東京 🗼 end",
    "  spaces  and\nnew lines\n\n",
    "العربية עברית",
    "a",
    "😀",
)


def detokenizer(tokenizer: PreTrainedTokenizerFast, *stop: str, skip: bool = True) -> Detokenizer:
    return Detokenizer(tokenizer, skip_special_tokens=skip, stop=stop)


def feed(text: Detokenizer, tokens: list[int]) -> list[str]:
    """What is shown after each token, up to where it stops."""
    shown = []
    for token in tokens:
        text.add(token)
        shown.append(text.text)
        if text.stopped:
            break
    text.finish()
    return [*shown, text.text]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_by_byte_equals_the_whole(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    shown = feed(detokenizer(tokenizer), tokens)
    assert shown[-1] == text == tokenizer.decode(tokens)
    assert shown[-2] == text, "the last character waits for the end"
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
    assert not any("\ufffd" in part for part in shown)


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_a_real_tokenizer_token_by_token(default_model_folder: str, text: str) -> None:
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(default_model_folder)
    tokens = real(text)["input_ids"]
    shown = feed(Detokenizer(real, skip_special_tokens=True, stop=()), tokens)
    assert shown[-1] == real.decode(tokens) == text


def test_a_character_that_is_never_finished_appears_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("a😀")["input_ids"][:-1]
    shown = feed(detokenizer(tokenizer), tokens)
    assert shown[:-1] == ["a"] * 4
    assert shown[-1] == tokenizer.decode(tokens)


def test_special_tokens_are_left_out_or_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id, *tokenizer("c")["input_ids"]]
    assert feed(detokenizer(tokenizer), tokens)[-1] == "abc"
    assert feed(detokenizer(tokenizer, skip=False), tokens)[-1] == f"ab{END}c"


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (("END",), "one two "),
        (("two",), "one "),
        (("END", "two"), "one "),
        (("wo E", "e t"), "on"),
        (("o", "one"), ""),
        (("never",), "one two END three"),
        (("three!",), "one two END three"),
        (("é",), "one two END three"),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    tokenizer: PreTrainedTokenizerFast, stops: tuple[str, ...], kept: str
) -> None:
    whole = "one two END three"
    text = detokenizer(tokenizer, *stops)
    shown = feed(text, tokenizer(whole)["input_ids"])
    assert shown[-1] == kept
    assert text.stopped == (kept != whole)
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier), "text was shown and taken back"


def test_a_stop_string_that_only_began_is_shown_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    text = detokenizer(tokenizer, "ENDE")
    shown = feed(text, tokenizer("the END")["input_ids"])
    assert shown[-2] == "the "
    assert shown[-1] == "the END"
    assert not text.stopped


def test_a_stop_string_of_several_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    text = detokenizer(tokenizer, "日😀")
    assert feed(text, tokenizer("é日😀!")["input_ids"])[-1] == "é"
    assert text.stopped
