"""The nouns that every layer shares."""

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from outpace import CompletionOutput, FinishReason, InputError, RequestOutput, SamplingParams
from outpace.types import Logprob, RequestMetrics

# vLLM's names and defaults (top_k: 0 and -1 mean all there)
VLLM_DEFAULTS = {
    "n": 1,
    "max_tokens": 16,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "seed": None,
    "stop": (),
    "include_stop_str_in_output": False,
    "stop_token_ids": (),
    "ignore_eos": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "structured_outputs": None,
}


def output_with(times: tuple[float | None, float | None], tokens: int) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[CompletionOutput(token_ids=[5] * tokens)],
        finished=True,
        metrics=RequestMetrics(arrival_time=10.0, first_token_time=times[0], last_token_time=times[1]),
    )


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == VLLM_DEFAULTS


def test_parameters_are_frozen_and_by_name_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[call-arg]


@pytest.mark.parametrize(("stop", "kept"), [("x", ("x",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())])
def test_stop_strings_become_a_tuple(stop: list[str] | str, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == kept
    assert hash(SamplingParams(stop=stop, stop_token_ids=[1, 2])) == hash(
        SamplingParams(stop=kept, stop_token_ids=(1, 2))
    )


def test_lists_and_mappings_become_tuples() -> None:
    given: dict[str, Any] = {"allowed_token_ids": [3, 1], "bad_words": ["a b"], "logit_bias": {9: 1, 2: -0.5}}
    params = SamplingParams(**given)
    kept = {name: getattr(params, name) for name in given}
    assert kept == {"allowed_token_ids": (3, 1), "bad_words": ("a b",), "logit_bias": ((2, -0.5), (9, 1))}
    assert hash(params) == hash(SamplingParams(**given))
    assert dataclasses.replace(params, n=2) == SamplingParams(n=2, **given)
    given["logit_bias"][9] = 50
    assert params.logit_bias == ((2, -0.5), (9, 1))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"n": 0}, "n: must be from 1 to 128, got 0"),
        ({"n": 129}, "n: must be from 1 to 128, got 129"),
        ({"n": 1.5}, "n: expected an integer, got 1.5"),
        ({"n": None}, "n: expected an integer, got None"),
        ({"presence_penalty": 2.1}, "presence_penalty: must be from -2 to 2, got 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: must be from -2 to 2, got nan"),
        ({"logprobs": -2}, "logprobs: must be from -1 to 2147483648, got -2"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids: expected token ids"),
        ({"logprob_token_ids": []}, "logprob_token_ids: expected 1 to 128 token ids, got 0"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids: expected 1 to 128 token ids, got 129"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs: 3 with 2 logprob_token_ids; give one of them"),
        ({"logprobs": True}, "logprobs: expected an integer, got True"),
        ({"logprobs": 2.0}, "logprobs: expected an integer, got 2.0"),
        ({"prompt_logprobs": -2}, "prompt_logprobs: must be from -1 to 2147483648, got -2"),
        ({"prompt_logprobs": "5"}, "prompt_logprobs: expected an integer, got '5'"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected at least one token id; use None to allow all"),
        ({"allowed_token_ids": 5}, "allowed_token_ids: expected token ids, got 5"),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids: expected token ids, got \[-1\]"),
        ({"allowed_token_ids": [True]}, r"allowed_token_ids: expected token ids, got \[True\]"),
        ({"bad_words": "word"}, "bad_words: expected strings that are not empty, got 'word'"),
        ({"bad_words": [""]}, "bad_words: expected strings that are not empty"),
        ({"bad_words": None}, "bad_words: expected strings that are not empty, got None"),
        ({"logit_bias": [1, 2]}, "logit_bias: expected a mapping from token ids to numbers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias: expected token ids as keys, got '5'"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias: expected token ids as keys, got -5"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\]: must be from -100 to 100, got 101"),
        ({"logit_bias": {5: "1"}}, r"logit_bias\[5\]: expected a number, got '1'"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output: expected True or False, got 1"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^{says}"):
        SamplingParams(**values)


def test_the_ends_of_the_ranges_are_inside() -> None:
    SamplingParams(n=128, presence_penalty=-2, frequency_penalty=2, logit_bias={0: 100, 1: -100}, logprobs=0)
    SamplingParams(prompt_logprobs=20, logit_bias={}, bad_words=[])


def test_a_logprob() -> None:
    assert Logprob(-0.5, 1) == Logprob(logprob=-0.5, rank=1, decoded_token=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Logprob(-0.5, 1).rank = 2  # type: ignore[misc]


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_every_seed_that_torch_takes(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("temperature", [1e-6, 9.9e-6, 5e-324])
def test_a_temperature_too_small_to_divide_by(temperature: float) -> None:
    with pytest.raises(
        InputError, match=f"^temperature: {temperature} is too small; use 0 for greedy, or 1e-05 or more$"
    ):
        SamplingParams(temperature=temperature)
    for allowed in (0, 1e-5):
        assert SamplingParams(temperature=allowed).temperature == allowed


def test_a_finish_reason_is_its_name() -> None:
    assert f"{FinishReason.STOP} {FinishReason.LENGTH}" == "stop length"


def test_times_and_speed() -> None:
    output = output_with((10.5, 12.5), tokens=5)
    assert output.metrics.time_to_first_token == 0.5
    assert output.decode_tokens_per_second == 2.0


@pytest.mark.parametrize("times", [(None, None), (10.5, 10.5)])
def test_no_speed_without_a_second_token(times: tuple[float | None, float | None]) -> None:
    assert output_with(times, tokens=1).decode_tokens_per_second is None


def test_no_time_before_the_first_token() -> None:
    assert output_with((None, None), tokens=0).metrics.time_to_first_token is None


@pytest.mark.slow
def test_nouns_version_and_help_do_not_wait_for_torch() -> None:
    code = (
        "import sys, outpace, outpace.types, outpace.cli.app\n"
        "assert outpace.SamplingParams and outpace.__version__ and 'LLM' in dir(outpace)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_can_be_imported() -> None:
    import outpace

    for name in outpace.__all__:
        assert getattr(outpace, name) is not None
    with pytest.raises(AttributeError, match="module 'outpace' has no attribute 'nonsense'"):
        _ = outpace.nonsense


def test_vllms_other_ways_to_say_nothing_are_taken() -> None:
    params = SamplingParams(top_k=-1, stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert (params.top_k, params.stop, params.stop_token_ids) == (0, (), ())


@pytest.mark.parametrize(
    ("name", "said"), [("max_new_tokens", "did you mean max_tokens?"), ("foo", "SamplingParams takes n, max_tokens, ")]
)
def test_an_unknown_parameter_gets_a_suggestion(name: str, said: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}: unknown parameter; ") as caught:
        SamplingParams(**{name: 5})  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint8(7),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(2)],  # type: ignore[list-item]
        logit_bias={np.int64(1): np.float32(2)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(max_tokens=3, temperature=0.5, seed=7, stop_token_ids=[2], logit_bias={1: 2.0})
    plain = [params.max_tokens, params.temperature, params.seed, *params.stop_token_ids]
    assert {type(each) for each in plain} == {int, float}
    assert [type(each) for each in dict(params.logit_bias or ())] == [int]


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "n"])
def test_text_in_place_of_an_integer(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: expected an integer, got '5'"):
        SamplingParams(**{name: "5"})  # type: ignore[arg-type]
