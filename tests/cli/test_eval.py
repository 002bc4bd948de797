"""`outpace eval`: the table, the sentences, the files it writes, and what it refuses before it starts."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from outpace.cli.eval import NO_EFFECT, _bar
from outpace.cli.flags import llm_flags
from tests.cli.command import Main
from tests.cli.command import run as outpace
from tests.models import byte_tokenizer
from tests.offload.placed import deep, offload_at

CPU = ("--device", "cpu", "--dtype", "fp32")


def test_one_model(chain_folder: Path) -> None:
    result = outpace("eval", chain_folder, *CPU, "--max-tokens", "100", "--window", "32")
    assert result.exit_code == 0, result.output
    assert "built-in text: 96 tokens, windows of 32" in result.stdout
    assert re.search(r"runs in +│ float32 on cpu", result.stdout)
    assert re.search(r"loss +│ \d+\.\d{4} nats per token", result.stdout)
    assert re.search(r"bits per byte +│ \d+\.\d{4}", result.stdout)
    assert re.search(r"\nperplexity \S+ over 96 tokens\n$", result.stdout)
    assert result.stderr.splitlines() == ["starting the model", "chain: 96 tokens"]


def test_two_models_side_by_side(chain_folder: Path, tmp_path: Path) -> None:
    text, file, picture = tmp_path / "own.txt", tmp_path / "found.json", tmp_path / "loss.png"
    text.write_text("world again, and again the whole world " * 5)
    options = ("--text", text, "--window", "64", "--stride", "32", "--json", file, "--plot", picture)
    result = outpace("eval", "-m", chain_folder, *CPU, "--against", chain_folder, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"own.txt: 194 tokens, windows of 64", result.stdout)
    assert re.search(r"\nperplexity (\S+) against \1: 0\.00 % \(standard error 0\.00 %\)\n", result.stdout)
    same = "the likeliest token is the same at 100.00 % of positions; KL divergence 0 nats on average, 0 at most\n"
    assert result.stdout.endswith(same)
    found = json.loads(file.read_text())
    assert (found["increase"], found["agreement"]["top1"], found["agreement"]["exact"]) == (0, 1, True)
    assert (found["window"], found["stride"], found["text"]) == (64, 32, "own.txt")
    assert found["model"]["perplexity"] == found["against"]["perplexity"]
    assert sum(window["tokens"] for window in found["model"]["windows"]) == 194
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_one_model(chain_folder: Path, tmp_path: Path) -> None:
    assert outpace("eval", chain_folder, *CPU, "--max-tokens", "9", "--plot", tmp_path / "a.png").exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_both_models(chain_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "options.yaml"
    config.write_text("block-size: 32\ndtype: bf16\n")
    more = ("--max-tokens", "20", "--config", config, "--against-config", '{"dtype": "bf16", "block-size": 16}')
    result = outpace("eval", chain_folder, *CPU, *more)
    assert result.exit_code == 0, result.output
    assert re.search(r"runs in +│ float32 on cpu +│ bfloat16 on cpu", result.stdout)
    assert re.search(r"options +│ cache.block_size=32 +│ cache.block_size=16", result.stdout)


def test_layers_that_are_streamed(tmp_path: Path, run_main: Main) -> None:
    folder, tokenizer = tmp_path / "model", byte_tokenizer()
    model = deep("llama", vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    offload = json.dumps({"offload": offload_at("disk", model, tmp_path / "files")})
    file = tmp_path / "found.json"
    more = ("--max-tokens", "60", "--window", "32", "--against-config", offload, "--json", file)
    result = outpace("eval", folder, *CPU, *more)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["agreement"]["exact"]
    assert len(list((tmp_path / "files").iterdir())) == 1, "layers were on disk"
    for command in ("generate", "info", "verify", "bench"):
        code, _, errors = run_main(command, "--cpu-offload-gb", "1")
        assert (code, "No such option: --cpu-offload-gb" in errors) == (2, True)


def test_flags_are_the_options_of_the_model() -> None:
    shown = outpace("eval", "--help").stdout
    assert "--max-num-batched-tokens" in shown
    assert "--max-waiting" not in shown  # nothing that would change nothing
    assert outpace("eval", "--wndow", "3").exit_code == 2
    assert set(NO_EFFECT) <= {flag.path for flag in llm_flags()}


def test_the_bar_moves_and_ends_for_each_model() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with _bar(console) as report:
        for step in (("starting", 0, 0), ("first", 0, 9), ("first", 9, 9), ("starting", 0, 0), ("second", 3, 9)):
            report(*step)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "9/9" in shown
    assert shown.rindex("first") < shown.index("second")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plot", "loss.doc"), "plot: loss.doc must end in one of .png, .svg, .pdf"),
        (("--json", "no/such/found.json"), "no/such/found.json: there is no folder no/such; make it first"),
        (("--window", "1"), "window: expected an integer from 2"),
        (("--text", "/no/such/text"), "text: cannot read /no/such/text (No such file or directory); give a text file"),
        (("--dtype", "fp7"), "dtype: "),
        (("--config", "{dtype"), "config: '{dtype' is not JSON"),
        (("--against-config", '{"dtype": bf16}'), "against-config: "),
        (("--config", '{"block_sise": 16}'), "unknown name 'block_sise': did you mean 'block_size'?"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_looked_for(
    options: tuple[str, ...], said: str, run_main: Main
) -> None:
    code, _, err = run_main("eval", "/no/such/model", *options)
    assert code == 2
    assert err.startswith(f"error: {said}")


def test_a_reference_that_is_not_there_is_called_against(run_main: Main, chain_folder: Path) -> None:
    code, _, err = run_main("eval", chain_folder, *CPU, "--against", "/no/such/model")
    assert code == 1
    assert err.startswith("error: against: ")


def test_a_plot_without_matplotlib(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run_main("eval", tmp_path / "nothing", "--plot", tmp_path / "loss.png")
    assert (code, out) == (2, "")
    assert err == "error: plot: matplotlib is not installed; pip install outpace[bench]\n"


@pytest.mark.real
@pytest.mark.usefixtures("default_model_folder")
def test_the_default_model() -> None:
    options = ("--dtype", "bf16", "--against-config", '{"dtype": "fp32"}')
    result = outpace("eval", *options, "--device", "cpu", "--max-tokens", "200")
    assert result.exit_code == 0, result.output
    assert re.search(r"name +│ SmolLM2-135M-Instruct +│ SmolLM2-135M-Instruct", result.stdout)
    assert re.search(r"\nperplexity \d\d\.\d\d against \d\d\.\d\d: \S+ % \(standard error 0\.\d\d %\)\n", result.stdout)
