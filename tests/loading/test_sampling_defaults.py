"""Sampling values of generation_config.json: applied where nobody says otherwise, in every face alike."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, ConfigError, SamplingParams
from outpace.loading.sampling_defaults import sampling_defaults
from tests.cli.command import run
from tests.models import CYCLE

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 7}
GIVEN = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1, max_tokens=7)


def with_values(folder: Path, target: Path, **values: Any) -> Path:
    """A copy of a model with these values in its generation config."""
    shutil.copytree(folder, target)
    file = target / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return target


def test_item_17_llm_takes_the_values_of_the_model(
    chain_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_values(chain_folder, tmp_path / "model", do_sample=True, **RECOMMENDED)
    with caplog.at_level(logging.INFO, "outpace"):
        llm = LLM(folder, device="cpu")
    assert "sampling defaults: temperature 0.6, top_p 0.95, top_k 20, " in caplog.text
    assert llm.get_default_sampling_params() == GIVEN
    asked = [{"role": "user", "content": "hello"}]
    for output in (*llm.generate("?"), *llm.chat(asked), *llm.generate(["?"], None), *llm.stream("?")):
        assert len(output.outputs[0].token_ids) <= 7
    assert len(llm.generate("?")[0].outputs[0].token_ids) == 7
    explicit = SamplingParams(max_tokens=50, temperature=0)
    assert llm.generate("?", explicit)[0].outputs[0].text == CYCLE


def test_item_17_it_can_be_turned_off_and_taken_from_elsewhere(chain_folder: Path, tmp_path: Path) -> None:
    folder = with_values(chain_folder, tmp_path / "model", **RECOMMENDED)
    for off in ("none", "vllm"):
        assert LLM(folder, device="cpu", generation_config=off).get_default_sampling_params() == SamplingParams()
    other = with_values(chain_folder, tmp_path / "other", temperature=0.1)
    for given in (other, other / "generation_config.json"):
        llm = LLM(folder, device="cpu", generation_config=str(given))
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.1)


def test_item_17_the_default_model_has_the_values_of_its_card() -> None:
    card = {"temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults("auto", None, card) == card
    assert sampling_defaults("none", None, card) == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"temperature": -1}',
            "generation_config: temperature: must be from 0 to 100, got -1 .* generation_config=none",
        ),
        ("[1]", "holds a list; it must hold a JSON object"),
        ("{", "cannot read .* give a JSON file"),
        (None, "there is no .*; give auto, none, or a folder that has a generation_config.json"),
    ],
)
def test_item_17_a_wrong_generation_config(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        sampling_defaults(str(tmp_path), None, {})


def test_item_17_commands_take_the_values_of_the_model(chain_folder: Path, tmp_path: Path) -> None:
    hot = with_values(chain_folder, tmp_path / "hot", temperature=50.0)
    cold = with_values(chain_folder, tmp_path / "cold", temperature=0.0)
    commands: list[tuple[tuple[str, ...], str | None]] = [
        (("generate", "hello", "-m", "{}", "--max-tokens", "12"), None),
        (("chat", "{}", "--max-tokens", "12"), "hello\n"),
        (("complete", "?", "-m", "{}", "--max-tokens", "12"), None),
    ]
    for command, stdin in commands:

        def said(folder: Path, *options: str, of: tuple[str, ...] = command, stdin: str | None = stdin) -> str:
            given = [part.format(folder) for part in of]
            return run(*given, "--device", "cpu", "--seed", "1", *options, stdin=stdin).stdout

        assert said(cold) == said(hot, "--temperature", "0") == said(hot, "--generation-config", str(cold))
        assert said(hot) != said(cold)
