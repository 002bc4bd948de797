"""The nouns that every layer shares."""

import dataclasses
import subprocess
import sys

import pytest

from outpace import CompletionOutput, FinishReason, InputError, RequestOutput, SamplingParams
from outpace.types import RequestMetrics

# vLLM's names and defaults (top_k: 0 and -1 mean all there)
VLLM_DEFAULTS = {
    "max_tokens": 16,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "skip_special_tokens": True,
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
