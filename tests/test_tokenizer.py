"""Text from tokens as they come: every kind of tokenizer, special tokens, stop strings, prompts, streams."""

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outpace.tokenizer import Detokenizer, token_texts
from tests.models import END, byte_tokenizer

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
BYTES = [f"<0x{byte:02X}>" for byte in (*b"\nA", *"é😀".encode(), 0xFF)]
PROPERTY = settings(max_examples=50, deadline=None, database=None, derandomize=True)
TOOL = "<tool>"  # an added token that is not special


def fast(backend: Tokenizer, decoder: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer with a decoder, an added token and a special one."""
    if decoder is not None:
        backend.decoder = decoder
    backend.add_tokens([AddedToken(TOOL, normalized=False)])
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, **options)


def words(*tokens: str) -> Tokenizer:
    """A backend that has just these tokens: decoding does not care where they come from."""
    return Tokenizer(
        token_models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])
    )


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    """Like GPT-2's and Llama 3's: tokens of several bytes, some of which end in the middle of a character."""
    letters = bytes_to_unicode()
    pieces = (
        b"a",
        b" n",
        b" the",
        b" '",
        b"t",
        b" .",
        b".",
        b" ",
        b"\n",
        b"\xf0",
        b"\x9f",
        b"\x98\x80",
        b"\xe2\x82",
        b"\xac b",
    )
    more = (b"\xff", b"\x80", b"\xa9\xc3", b" \xf0\x9f", "\ufffd".encode(), "日本".encode())
    return fast(
        words(*("".join(letters[byte] for byte in piece) for piece in (*pieces, *more))),
        decoders.ByteLevel(),
        **options,
    )


def trained(model: Any, trainer: Any, splitter: Any, decoder: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = splitter
    backend.train_from_iterator(TEXTS, trainer)
    return fast(backend, decoder)


def trained_byte_level() -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return trained(token_models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def unigram() -> PreTrainedTokenizerFast:
    """Like T5's: the Metaspace decoder drops the word-start mark of the first token."""
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(token_models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def byte_fallback(*more: Any) -> PreTrainedTokenizerFast:
    """Like Gemma's; with `Strip` like Llama 2's and Mistral's."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    return fast(words("<unk>", "▁", "▁▁", "▁hello", "lo", ".", "日", *BYTES), decoders.Sequence(steps))


def word_piece(cleanup: bool, **options: Any) -> PreTrainedTokenizerFast:
    """Like BERT's."""
    tokens = ("[UNK]", "do", "n", "'", "t", "s", "m", "ve", "r", ".", ",", "##ing", "##n", "'s", "n't", "日", "##本")
    return fast(words(*tokens), decoders.WordPiece(cleanup=cleanup), **options)


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, which joins its tokens in the way it is told; counts the tokens it has decoded."""

    def __init__(self, join: Callable[[list[str]], str], *tokens: str, **options: Any) -> None:
        self._all = tokens
        self._join = join
        self.decoded = 0
        super().__init__(eos_token=END, **options)

    @property
    def vocab_size(self) -> int:
        return len(self._all)

    def get_vocab(self) -> dict[str, int]:
        return {**{token: number for number, token in enumerate(self._all)}, **self.added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._all[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._join(tokens)

    def _decode(self, token_ids: int | list[int], *args: Any, **options: Any) -> str:
        self.decoded += 1 if isinstance(token_ids, int) else len(token_ids)
        return super()._decode(token_ids, *args, **options)


def slow_pieces() -> Slow:
    """Like those that run on SentencePiece: spaces at both ends are stripped."""
    return Slow(lambda tokens: "".join(tokens).replace("▁", " ").strip(), "<unk>", "▁", "▁a", "b", "▁▁", ".", "日")


def slow_words(**options: Any) -> Slow:
    """Like BERT's in Python."""
    tokens = ("[UNK]", "do", "n", "'", "t", "'s", ".", "##ing", "r")
    return Slow(lambda tokens: " ".join(tokens).replace(" ##", "").strip(), *tokens, **options)


KINDS: dict[str, Callable[[], Any]] = {
    "one byte a token": byte_tokenizer,
    "byte level": byte_level,
    "byte level, cleanup asked for": lambda: byte_level(clean_up_tokenization_spaces=True),
    "byte level, trained": trained_byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, first space stripped": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
    "unigram": unigram,
    "word piece": lambda: word_piece(False),
    "word piece, decoder cleans": lambda: word_piece(True),
    "word piece, cleanup": lambda: word_piece(False, clean_up_tokenization_spaces=True),
    "ends of words": lambda: fast(words("lo</w>", "hel", "a</w>", "."), decoders.BPEDecoder()),
    "no decoder": lambda: fast(words("a", "bc", ".", "日")),
    "slow bytes": lambda: ByT5Tokenizer(extra_ids=2),
    "slow pieces": slow_pieces,
    "slow words": slow_words,
    "slow words, cleanup": lambda: slow_words(clean_up_tokenization_spaces=True),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


def ids(tokenizer: Any, *tokens: str) -> list[int]:
    found = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    assert tokenizer.convert_ids_to_tokens(found) == list(tokens)
    return found


def answers(tokenizer: Any, longest: int = 60) -> st.SearchStrategy[list[int]]:
    """Any tokens, among them for fast tokenizers one that does not exist (models often have more than tokenizers)."""
    return st.lists(st.integers(0, len(tokenizer) - (not tokenizer.is_fast)), max_size=longest)


def detokenizer(tokenizer: Any, *stop: str, skip: bool = True, **options: Any) -> Detokenizer:
    return Detokenizer(tokenizer, skip_special_tokens=skip, stop=stop, **options)


def feed(text: Detokenizer, tokens: Sequence[int]) -> list[str]:
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
def test_a_real_tokenizer_token_by_token(default_model_folder: Path, text: str) -> None:
    real = real_tokenizer(default_model_folder)
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


@EVERY_KIND
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_the_text_is_that_of_all_tokens_however_it_is_read(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(answers(tokenizer))
    whole = tokenizer.decode(tokens, skip_special_tokens=skip)
    lazy, read, streamed = (detokenizer(tokenizer, skip=skip) for _ in range(3))
    shown, taken = [""], ""
    for token in tokens:
        for each in (lazy, read, streamed):
            each.add(token)
        if data.draw(st.booleans()):
            shown.append(read.text)
        if data.draw(st.booleans()):
            taken += streamed.take()
            assert streamed.text == taken
    for each in (lazy, read, streamed):
        each.finish()
        assert each.text == whole
    assert taken + streamed.take() == whole
    for earlier, later in itertools.pairwise([*shown, whole]):
        assert later.startswith(earlier), "text was shown and taken back"


@EVERY_KIND
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_an_answer_is_what_its_tokens_add_to_the_prompt(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, tokens = data.draw(answers(tokenizer, 20)), data.draw(answers(tokenizer, 20))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *tokens], skip_special_tokens=skip)
    assume(whole.startswith(before))
    shown = feed(detokenizer(tokenizer, skip=skip, prompt_token_ids=prompt), tokens)
    assert before + shown[-1] == whole
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)


@EVERY_KIND
@PROPERTY
@given(data=st.data(), include=st.booleans())
def test_stop_strings_are_found_where_they_first_appear(kind: str, data: st.DataObject, include: bool) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(answers(tokenizer, 30))
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    spots = st.tuples(st.integers(0, len(whole)), st.integers(1, 6))
    stops = [whole[at : at + size] for at, size in data.draw(st.lists(spots, min_size=1, max_size=4))]
    stops = [stop for stop in [*stops, data.draw(st.text("an '.日", max_size=3))] if stop and "\ufffd" not in stop]
    assume(stops)
    text = detokenizer(tokenizer, *stops, include_stop_str_in_output=include)
    shown = feed(text, tokens)
    count, start, end, stop = first_stop(tokenizer, tokens, stops)
    assert (len(text.token_ids), text.stop_reason, text.stopped) == (count, stop, stop is not None)
    assert shown[-1] == tokenizer.decode(tokens[:count], skip_special_tokens=True)[: end if include else start]
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)


def first_stop(tokenizer: Any, tokens: list[int], stops: list[str]) -> tuple[int, int | None, int | None, str | None]:
    """How many tokens it takes until a stop string is in their text, and where it is."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        found = [(at, at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return (count, *min(found))
    return len(tokens), None, None, None


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("byte level, cleanup asked for", ["a", "Ġ'", "Ġ", "."]),
        ("word piece, cleanup", ["do", "n", "'", "t", "n", "'", "n", "'", "s", ".", "n", "."]),
        ("slow words, cleanup", [*["[UNK]"] * 9, "n", "r", "r", "r", "'", "t", "."]),
    ],
)
def test_spaces_that_cleanup_may_remove_wait(kind: str, tokens: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    shown = feed(detokenizer(tokenizer), ids(tokenizer, *tokens))
    assert shown[-1] == tokenizer.decode(ids(tokenizer, *tokens))
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)


@pytest.mark.real
@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_of_a_real_tokenizer(default_model_folder: Path, data: st.DataObject, skip: bool) -> None:
    real = real_tokenizer(default_model_folder)
    pieces = st.one_of(
        st.integers(0, len(real)).map(lambda token: [token]),
        st.sampled_from(TEXTS).map(lambda text: real(text)["input_ids"]),
        st.text(max_size=3).map(lambda text: real(text)["input_ids"]),
    )
    tokens = list(itertools.chain(*data.draw(st.lists(pieces, max_size=20))))
    shown = feed(detokenizer(real, skip=skip), tokens)
    assert shown[-1] == real.decode(tokens, skip_special_tokens=skip)
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)


@cache
def real_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_bytes_that_can_never_be_text_show_when_the_next_token_comes(tokenizer: PreTrainedTokenizerFast) -> None:
    start, letter = ids(tokenizer, bytes_to_unicode()[0xFF], "a")
    assert feed(detokenizer(tokenizer), [start, start, letter]) == ["", "\ufffd", "\ufffd\ufffda", "\ufffd\ufffda"]


def test_byte_tokens_wait_for_each_other_because_one_bad_byte_spoils_them_all() -> None:
    llama = tokenizer_of("byte fallback, first space stripped")
    good, cut, bad = (
        ids(llama, *tokens)
        for tokens in (["<0x0A>", "<0x41>", "lo"], ["<0xF0>", END, "<0x9F>"], ["<0x41>", "<0xFF>", "<0x41>"])
    )
    assert feed(detokenizer(llama), good) == ["", "", "\nAlo", "\nAlo"]
    assert feed(detokenizer(llama), cut) == ["", "", "", "\ufffd\ufffd"]
    assert feed(detokenizer(llama), bad) == ["", "\ufffd" * 2, "\ufffd" * 3, "\ufffd" * 3]


def test_a_token_that_does_not_exist_does_not_part_the_bytes_of_a_character() -> None:
    llama = tokenizer_of("byte fallback")
    first, last = ids(llama, "<0xC3>", "<0xA9>")
    shown = feed(detokenizer(llama), [*ids(llama, "lo"), first, len(llama), last, *ids(llama, "lo")])
    assert shown == ["lo", "lo", "lo", "lo", "loélo", "loélo"]


@pytest.mark.parametrize("prompt", [[], ["lo"]])
@pytest.mark.parametrize("count", [9, 50])
def test_many_byte_tokens_in_a_row_are_shown_without_waiting_for_the_last(prompt: list[str], count: int) -> None:
    llama = tokenizer_of("byte fallback, first space stripped")
    smiles = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"] * count
    text = detokenizer(llama, prompt_token_ids=ids(llama, *prompt))
    shown = feed(text, ids(llama, *smiles, "▁hello"))
    assert shown[-1] == "😀" * count + " hello"
    assert all(len(part) > number / 4 - 11 for number, part in enumerate(shown))
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)


def test_a_bad_byte_does_not_take_back_what_did_not_wait() -> None:
    llama = tokenizer_of("byte fallback, first space stripped")
    shown = feed(detokenizer(llama), ids(llama, "lo", *["<0x41>"] * 40, "<0xFF>", "lo"))
    assert shown[-1] == "lo" + "A" * 33 + "\ufffd" * 8 + "lo"


def test_a_stop_string_of_a_byte_token_ends_the_answer_at_once() -> None:
    llama = tokenizer_of("byte fallback, first space stripped")
    text = detokenizer(llama, "\n")
    assert feed(text, ids(llama, "lo", "<0x0A>", "▁hello"))[-1] == "lo"
    assert len(text.token_ids) == 2


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "text"),
    [
        ("byte fallback, first space stripped", ["▁hello"], ["▁hello"], " hello"),
        ("byte fallback, first space stripped", ["▁hello", *[END] * 9], ["▁hello"], " hello"),
        ("byte fallback, first space stripped", [END], ["▁hello"], "hello"),
        ("byte fallback, first space stripped", [], ["▁hello"], "hello"),
        ("byte fallback, first space stripped", ["lo", "<0x0A>"], ["▁hello"], " hello"),
        ("byte fallback, first space stripped", ["lo", "<0xF0>", "<0x9F>"], ["<0x98>", "<0x80>"], "😀"),
        ("byte fallback, first space stripped", ["lo", "<0xF0>", "<0x9F>"], ["lo"], "lo"),
        ("byte fallback", ["lo", "<0xC3>"], ["<0xA9>", "<0xC3>"], "\ufffd\ufffd"),
        ("word piece", ["do"], ["##ing", "do"], "ing do"),
        ("word piece, cleanup", ["do", "'"], ["do"], "do"),
        ("word piece, cleanup", ["do", "n"], ["'", "t", "."], "'t."),
        ("byte level, cleanup asked for", ["a", "Ġ'"], ["a"], "a"),
        ("slow pieces", ["▁a"], ["▁a"], " a"),
    ],
)
def test_what_stands_before_the_answer(kind: str, prompt: list[str], answer: list[str], text: str) -> None:
    tokenizer = tokenizer_of(kind)
    before, tokens = (ids(tokenizer, *part) for part in (prompt, answer))
    assert feed(detokenizer(tokenizer, prompt_token_ids=before), tokens)[-1] == text


def test_the_shorter_of_two_stop_strings_that_begin_together() -> None:
    tokenizer = tokenizer_of("byte level")
    text = detokenizer(tokenizer, "the", "he", "th", include_stop_str_in_output=True)
    assert feed(text, ids(tokenizer, "Ġthe"))[-1] == " th"
    assert text.stop_reason == "th"


def test_nothing_follows_a_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    text = detokenizer(tokenizer, "b")
    for token in tokenizer("abc")["input_ids"]:
        text.add(token)
    text.finish()
    assert (text.text, text.take(), text.take()) == ("a", "a", "")


def test_long_stop_strings_that_almost_appear(tokenizer: PreTrainedTokenizerFast) -> None:
    size = 2000
    stops = [letter * size + "!" for letter in "abc"]
    text = detokenizer(tokenizer, *stops)
    (a, b, end) = tokenizer("ab!")["input_ids"]
    for token in [a] * 3 * size:
        text.add(token)
    assert text.text == "a" * 2 * size, "what may be the beginning of a stop string is held back, and no more"
    text.add(b)
    assert text.text == "a" * 3 * size
    for token in [a] * (size + 5) + [end]:
        text.add(token)
    assert text.text == "a" * 3 * size + "b" + "a" * 5
    assert text.stop_reason == stops[0]


def test_adding_decodes_nothing_and_reading_decodes_each_token_a_few_times() -> None:
    tokenizer = slow_pieces()
    tokens = ids(tokenizer, *["▁a", "b", "▁a", END] * 250)
    lazy, eager = detokenizer(tokenizer), detokenizer(tokenizer)
    tokenizer.decoded = 0
    for token in tokens:
        lazy.add(token)
    assert tokenizer.decoded == 0
    assert len(lazy.text) == 1249
    assert tokenizer.decoded < 1.1 * len(tokens)
    tokenizer.decoded = 0
    for token in tokens:
        eager.add(token)
        eager.take()
    assert tokenizer.decoded < 20 * len(tokens)
    assert eager.text == lazy.text


def test_tokens_that_show_nothing_do_not_pile_up() -> None:
    tokenizer = slow_pieces()
    text = detokenizer(tokenizer)
    tokenizer.decoded = 0
    for token in ids(tokenizer, "▁a", *[END] * 1000, "▁a"):
        text.add(token)
        text.take()
    assert text.text == "a a"
    assert tokenizer.decoded < 20 * 1000


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("byte level", {"a": "a", "Ġthe": " the", "ð": "\ufffd", "ĠðŁ": " \ufffd", "©Ã": "\ufffd\ufffd", END: END}),
        ("byte fallback", {"▁hello": " hello", "lo": "lo", "<0x0A>": "\n", "<0xF0>": "\ufffd", END: END}),
        ("byte fallback, first space stripped", {"▁hello": " hello", "▁▁": "  ", "▁": " ", "<0x41>": "A"}),
        ("word piece", {"do": " do", "##ing": "ing", TOOL: f" {TOOL}"}),
        ("slow pieces", {"▁a": " a", "b": "b"}),
    ],
)
def test_texts_of_single_tokens(kind: str, texts: dict[str, str]) -> None:
    tokenizer = tokenizer_of(kind)
    assert token_texts(tokenizer, ids(tokenizer, *texts, *texts)) == [*texts.values(), *texts.values()]


def test_one_thread_adds_while_another_reads() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("héllo wörld 😀! " * 40)["input_ids"]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for stop in ((), ("\0never",)):
            text = Detokenizer(tokenizer, skip_special_tokens=True, stop=stop)
            reader = threading.Thread(target=lambda text=text: [text.text for _ in range(300)])
            reader.start()
            for token in ids:
                text.add(token)
            reader.join()
            text.finish()
            assert text.text == "héllo wörld 😀! " * 40
    finally:
        sys.setswitchinterval(before)
