"""The requests are those of the definition, whoever draws them, and files are read or refused."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.bench.workload import Item, Workload, chat_like, check_lengths, latency_prompt, uniform
from outpace.errors import InputError


def letters(text: str) -> list[int]:
    """A token for each letter."""
    return [ord(letter) for letter in text]


def source(**options: object) -> tuple[list[Item], list[Item]]:
    """Three requests and their warm-up."""
    drawn = Workload(**options).source(97, letters, 100)  # type: ignore[arg-type]
    return drawn.draw(3, 7), drawn.warm_up(3, 7)


# (vocabulary, number of the request, prompt tokens, new tokens, first ids)
DEFINED = [
    (128256, 0, 860, 289, [18768, 15573, 2760, 16010]),
    (128256, 1, 183, 67, [12548, 9142, 23638, 26376]),
    (128256, 255, 819, 246, [9213, 26531, 28025, 20061]),
    (97, 0, 860, 289, [83, 70, 20, 72]),
    (97, 255, 819, 246, [45, 88, 23, 49]),
]


@pytest.mark.parametrize(("vocab", "number", "length", "output", "first"), DEFINED)
def test_the_draw_is_the_one_that_others_were_measured_with(
    vocab: int, number: int, length: int, output: int, first: list[int]
) -> None:
    item = uniform(vocab)[number]
    assert (len(item.prompt), item.output_len, item.prompt[:4]) == (length, output, first)


def test_the_whole_of_the_draw_and_its_warm_up() -> None:
    items = uniform(128256)
    assert (len(items), sum(len(item.prompt) for item in items)) == (256, 141372)
    assert sum(item.output_len for item in items) == 73207
    warm_up = Workload().source(128256, letters, 2048).warm_up(256, 1234)[0]
    assert (len(warm_up.prompt), warm_up.output_len, warm_up.prompt[:4]) == (994, 416, [17987, 4289, 16211, 15203])


def test_the_prompt_of_latency() -> None:
    prompt = latency_prompt(128256)
    assert (len(prompt), prompt[:4], prompt[-1]) == (128, [24705, 28974, 8560, 1858], 7970)
    assert latency_prompt(128256, number=1) != prompt


def test_fixed_lengths() -> None:
    items, warm_up = source(input_len=5, output_len=3)
    assert [(len(item.prompt), item.output_len) for item in items] == [(5, 3)] * 3
    assert [(len(item.prompt), item.output_len) for item in warm_up] == [(5, 3)] * 3
    assert items != warm_up


def test_chat_like_lengths_have_their_means_and_are_skewed() -> None:
    items = chat_like(32000, 3000)
    prompts, outputs = [len(item.prompt) for item in items], [item.output_len for item in items]
    assert statistics.fmean(prompts) == pytest.approx(220, rel=0.1)
    assert statistics.fmean(outputs) == pytest.approx(200, rel=0.1)
    assert statistics.median(prompts) < 0.75 * statistics.fmean(prompts)
    assert chat_like(32000, 3000) == items


@given(st.integers(2, 60), st.integers(0, 9))
def test_chat_like_requests_fit_the_model(max_model_len: int, seed: int) -> None:
    check_lengths(chat_like(97, 20, seed, max_model_len), max_model_len)


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    lines = [{"prompt": "hello", "output_len": 4}, {"prompt": [3, 4]}, {"prompt": "x" * 99}]
    file.write_text("\n".join(map(json.dumps, lines)))
    drawn = Workload(dataset=file).source(97, letters, 130)
    assert sorted(drawn.draw(2, 0)) == [Item([3, 4], 128), Item(letters("hello"), 4)]
    assert sorted(map(_lengths, drawn.warm_up(2, 0))) == [(2, 128), (5, 4)]
    assert not set(map(str, drawn.warm_up(2, 0))) & set(map(str, drawn.draw(2, 0)))
    shorter = Workload(dataset=file, output_len=9).source(97, letters, 200).draw(3, 0)
    assert sorted(item.output_len for item in shorter) == [4, 9, 9]
    with pytest.raises(InputError, match="num-prompts: 3 is more than the 2 usable requests"):
        drawn.draw(3, 0)


def _lengths(item: Item) -> tuple[int, int]:
    return len(item.prompt), item.output_len


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    turns = [[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], [{"from": "human", "value": "?"}]]
    file.write_text(json.dumps([{"id": "a", "conversations": turn} for turn in turns]))
    assert Workload(dataset=file).source(97, letters, 50).draw(1, 0) == [Item(letters("hi"), 5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is neither JSON nor JSON lines"),
        ("[3]", "expected an object, got 3"),
        ('{"text": "hello"}', 'expected "prompt"'),
        ('{"prompt": "hello", "output_len": 0}', '"output_len" .a number >= 1.'),
        ('[{"conversations": [3]}]', 'expected turns with a "value"'),
        ('{"prompt": "hello", "output_len": 999}', "has no request that fits 100 tokens"),
    ],
)
def test_files_that_cannot_be_used(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "work.json"
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        source(dataset=file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dataset: cannot read"):
        source(dataset=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_len": 3}, "fixed lengths need both"),
        ({"output_len": 3}, "fixed lengths need both"),
        ({"input_len": 0, "output_len": 3}, "input-len: must be at least 1, got 0"),
        ({"chat": True, "input_len": 3, "output_len": 3}, "sharegpt draws its own lengths"),
        ({"dataset": Path("x"), "input_len": 3}, "remove one of the two"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Workload(**options)  # type: ignore[arg-type]


def test_requests_longer_than_the_model_are_refused() -> None:
    with pytest.raises(InputError, match=r"max-model-len: the longest request has 9 tokens, and .* for 8"):
        check_lengths([Item([3], 2), Item([3] * 5, 4)], 8)
