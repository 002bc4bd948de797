"""`outpace verify`: the table, the verdict and its exit code, the files it writes, and how it fails."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import outpace.verify.run as run
from outpace import InferenceEngine
from outpace.cli.results import progress
from tests.cli.command import Main
from tests.cli.command import run as outpace
from tests.models import tiny

CPU = ("--device", "cpu", "--dtype", "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama without a tokenizer."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama").save_pretrained(path)
    return path


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injection that spoils a weight of layer 1."""

    class Careless(InferenceEngine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.module.get_parameter("model.layers.1.qkv.weight").data.neg_()

    monkeypatch.setattr(run, "InferenceEngine", Careless)


def test_it_passes(folder: Path) -> None:
    result = outpace("verify", folder, *CPU)
    assert result.exit_code == 0, result.output
    assert "tiny in float32 on cpu, 2 fused layers" in result.stdout
    assert re.search(r"batch +│ 23 \+ 7 \+ 32 \+ 2 +│ \d\.\de[-+]\d+ +│ none +│ yes \(32 new\)", result.stdout)
    assert re.search(r"long +│ 32 +│", result.stdout)
    assert re.search(r"short +│ 1 +│", result.stdout)
    assert result.stdout.endswith("worst relative error against plain Hugging Face up to 0.0001\nPASS\n")


@pytest.mark.usefixtures("broken")
def test_it_fails_and_says_where(folder: Path) -> None:
    result = outpace("verify", folder, *CPU)
    assert result.exit_code == 1
    layer = r"model\.layers\.1: \d\.\de[-+]\d+ \(allowed 1\.0e-04\)"
    assert re.search(rf"batch .*│ {layer} +│ no: token \d+ of prompt \d \(32 new\)", result.stdout)
    assert result.stdout.endswith("FAIL\n")


@pytest.mark.usefixtures("broken")
def test_everything_is_in_the_json(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    outpace("verify", folder, *CPU, "--json", file)
    found = json.loads(file.read_text())
    assert (found["passed"], found["dtype"], found["fused_layers"]) == (False, "float32", 2)
    assert [prompts["name"] for prompts in found["prompts"]] == ["batch", "long", "short"]
    layers = found["prompts"][0]["layers"]
    assert [layer["name"] for layer in layers] == ["embedding", "model.layers.0", "model.layers.1"]
    assert layers[1]["error"] < layers[1]["allowed"] < layers[2]["error"]


def test_each_step_is_a_line_where_standard_error_is_no_terminal(folder: Path) -> None:
    lines = outpace("verify", folder, *CPU).stderr.splitlines()
    steps = ("loading the model", "plain, prompts 1 of 3", "injecting fused layers", "injected, prompts 3 of 3")
    assert [line for line in lines if line in steps] == list(steps)


def test_each_step_moves_one_line_of_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress(console) as say:
        say("loading the model")
        console.file.truncate(0)
        say("injecting fused layers")
    assert "injecting fused layers" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_help_says_what_it_costs() -> None:
    assert "loads the model and runs it several times" in outpace("verify", "--help").stdout


def test_16_bits(folder: Path) -> None:
    result = outpace("verify", folder, "--device", "cpu", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert "in bfloat16; greedy tokens do not count\nPASS\n" in result.stdout


def test_a_plot(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "error.png"
    assert outpace("verify", folder, *CPU, "--plot", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run_main("verify", tmp_path / "nothing", "--plot", tmp_path / "error.png")
    assert (code, out) == (2, "")
    assert err == "error: plot: matplotlib is not installed; pip install outpace[bench]\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plot", "error.doc"), "plot: error.doc must end in one of .png, .svg, .pdf"),
        (("--plot", "no/such/error.png"), "no/such/error.png: there is no folder no/such; make it first"),
        (("--json", "no/such/report.json"), "no/such/report.json: there is no folder no/such; make it first"),
        (("--dtype", "fp7"), "dtype: "),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_looked_for(
    options: tuple[str, ...], said: str, run_main: Main
) -> None:
    code, _, err = run_main("verify", "/no/such/model", *options)
    assert code == 2
    assert err.startswith(f"error: {said}")


def test_a_model_that_cannot_be_injected_is_one_line_and_exit_code_1(run_main: Main, tmp_path: Path) -> None:
    tiny("t5").save_pretrained(tmp_path / "t5")
    code, out, err = run_main("verify", tmp_path / "t5", *CPU)
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert "T5ForConditionalGeneration" in lines[0]


@pytest.mark.real
@pytest.mark.usefixtures("default_model_folder")
def test_the_default_model() -> None:
    result = outpace("verify", *CPU)
    assert result.exit_code == 0, result.output
    assert "SmolLM2-135M-Instruct in float32 on cpu, 30 fused layers" in result.stdout
    assert result.stdout.endswith("PASS\n")
