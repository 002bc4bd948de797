"""outpace.pipeline: MII's names on the same runtime."""

import pytest

import outpace
from outpace import InputError
from tests.models import CYCLE, byte_tokenizer, chain_model


@pytest.fixture(scope="module")
def pipe() -> outpace.Pipeline:
    tokenizer = byte_tokenizer()
    return outpace.pipeline(chain_model(tokenizer), tokenizer=tokenizer, device="cpu")


def test_responses_have_miis_names(pipe: outpace.Pipeline) -> None:
    first, second = pipe(["?", "w"], max_new_tokens=5, do_sample=False)
    assert (first.generated_text, first.prompt_length, first.generated_length) == ("world", 1, 5)
    assert (first.finish_reason, str(second)) == ("length", "orld ")
    (whole,) = pipe("?", do_sample=False)
    assert (whole.generated_text, whole.finish_reason) == (CYCLE, "stop")


def test_full_text_and_lengths(pipe: outpace.Pipeline) -> None:
    (response,) = pipe("?", max_length=4, do_sample=False, return_full_text=True)
    assert response.generated_text == "?wor"
    assert pipe("?", do_sample=False, stop="rl")[0].generated_text == "wo"
    assert pipe("?", seed=3, max_new_tokens=4) == pipe("?", seed=3, max_new_tokens=4)
    with pytest.raises(InputError, match="max_length: a prompt of 1 tokens leaves no room in 1"):
        pipe("?", max_length=1)
    with pytest.raises(InputError, match="num_beams: the pipeline has no such argument"):
        pipe("?", num_beams=2)


def test_item_23_more_new_tokens_than_there_is_room_for(pipe: outpace.Pipeline) -> None:
    for options in ({"max_new_tokens": 10**4}, {"max_new_tokens": 10**4, "min_new_tokens": 10**4}):
        (response,) = pipe("?", do_sample=False, ignore_eos=True, **options)  # type: ignore[arg-type]
        assert (response.generated_length, response.finish_reason) == (pipe.llm.max_model_len - 1, "length")
    assert pipe("?", do_sample=False, max_length=4, max_new_tokens=10**4)[0].generated_text == "wor"


def test_destroy() -> None:
    tokenizer = byte_tokenizer()
    pipe = outpace.pipeline(chain_model(tokenizer), tokenizer=tokenizer, device="cpu")
    pipe.destroy()
    with pytest.raises(outpace.StateError, match="shut down"):
        pipe("?")


def test_greedy_by_temperature_and_refusals(pipe: outpace.Pipeline) -> None:
    assert pipe("?", temperature=0, max_new_tokens=4) == pipe("?", do_sample=False, max_new_tokens=4)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer from 1, got 0"),
        ({"max_length": 0}, "max_length: expected an integer from 1"),
        ({"max_length": 10**6}, "max_length: 1000000 is more than max_model_len"),
        ({"do_sample": "no"}, "do_sample: expected True or False"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            pipe("?", **options)  # type: ignore[arg-type]
    for prompts in (5, None, [[3, 4]], {"a": 1}):
        with pytest.raises(InputError, match="prompts: expected text"):
            pipe(prompts)  # type: ignore[arg-type]
