"""`outpace quantize`: what it says, and how it ends."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outpace.cli.app import app, main
from outpace.cli.quantize import SCHEMES
from outpace.errors import OutpaceError
from outpace.loading.safetensors_file import SafetensorsWriter
from outpace.quant.asked import NAMED
from tests.loading.unpack import config_of, unpacked
from tests.models import CYCLE


def run(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["quantize", *map(str, args)])


def test_a_summary_for_people(chain_folder: Path, tmp_path: Path) -> None:
    result = run(chain_folder, "--scheme", "int8", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "no bar where there is no terminal"
    first, second, *worst = result.stdout.splitlines()
    sizes = r"\d+\.\d\d [KM]B became \d+\.\d\d [KM]B \(\d+%\) in \d+\.\d s"
    assert re.fullmatch(rf"{tmp_path / 'out'}: {sizes}", first)
    assert re.fullmatch(r"  \d+ weights quantized; the largest relative errors of a weight:", second)
    assert len(worst) == 5
    assert all(re.fullmatch(r"    \d+\.\d{3}%  [\w.]+\.weight", line) for line in worst)


def test_a_summary_for_programs(chain_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--scheme", "int4", "--asymmetric", "--head", "int8", "--exclude", "down_proj")
    result = run("-m", chain_folder, *options, "--dtype", "bf16", "--out", out, "--json")
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    sizes = {path.name: path.stat().st_size for path in out.glob("*.safetensors")}
    assert (found["folder"], found["files"], found["bytes"]) == (str(out), sizes, sum(sizes.values()))
    assert found["bytes_before"] == (chain_folder / "model.safetensors").stat().st_size
    assert (found["quantized"], found["tokenizer"], found["taken_up"]) == (len(unpacked(out)), True, [])
    assert set(found["errors"]) == {f"{name}.weight" for name in unpacked(out)}
    assert max(found["errors"].values()) == max(found["worst"].values())
    assert all("down_proj" in name for name in config_of(out)["ignore"])
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_it_is_replaced_only_by_force(
    chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(chain_folder, "--scheme", "int8", "--out", out).exit_code == 0
    arguments = ["quantize", str(chain_folder), "--scheme", "fp8", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["outpace", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert f"error: out: {out} holds quantized weights already; give --force" in capsys.readouterr().err
    assert run(*arguments[1:], "--force").exit_code == 0
    assert config_of(out)["format"] == "float-quantized"


def test_a_signal_before_a_file_is_finished_leaves_nothing(
    chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SafetensorsWriter, "write", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    assert run(chain_folder, "--scheme", "int8", "--out", tmp_path / "out").exit_code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--scheme", "int8"), "Missing option '--out'"),
        (("--scheme", "int8", "--out", "x", "--groups", "3"), "Did you mean --group-size?"),
    ],
)
def test_options_that_cannot_work(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_scheme_that_is_not_known(tmp_path: Path) -> None:
    result = run("x", "--scheme", "int3", "--out", tmp_path / "out")
    assert str(result.exception) == "scheme: expected one of int8, int4, w8a8, fp8, got 'int3'"
    assert set(SCHEMES) == set(NAMED)


ONE = "scheme: give one of --scheme, --plan, --auto, --max-bytes, --bits-per-weight"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ONE),
        (("--scheme", "int8", "--auto", "0.01"), f"{ONE}, not 2"),
        (("--scheme", "int8", "--tokens", "64"), "tokens: nothing is measured or calibrated; remove it"),
        (
            ("--auto", "0.01", "--head", "int8"),
            "group-size, asymmetric, head, exclude, method, smooth: a plan has a scheme for each weight",
        ),
        (("--auto", "-1"), "quant.auto.max_perplexity_increase: input should be greater than 0"),
        (("--max-bytes", "many"), "quant.auto.max_bytes: 'many' is not a size; write it as 4GB"),
        (("--plan", "no-such-file.json"), "quant.plan: cannot read no-such-file.json"),
    ],
)
def test_ways_that_cannot_work(args: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = run("x", "--out", tmp_path / "out", *args)
    assert str(result.exception).startswith(words)


def test_a_plan_is_measured_and_written_and_given_back(chain_folder: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(CYCLE * 40))
    options = ("--bits-per-weight", "9", "--text", text, "--tokens", "64", "--device", "cpu", "--dtype", "fp32")
    result = run(chain_folder, *options, "--out", out)
    assert result.exit_code == 0, result.exception
    assert "bits a weight" in result.stdout
    assert "  calibration: perplexity" in result.stdout
    plan = json.loads((out / "outpace-plan.json").read_text())
    assert (out / "outpace-plan.md").is_file()
    assert (out / "outpace-plan.png").is_file()
    wanted = {
        name.removesuffix(".weight"): weight["scheme"]["values"]
        for weight in plan["weights"]
        for name in weight["names"]
        if weight["scheme"] is not None
    }
    assert unpacked(out).keys() == wanted.keys()
    groups = config_of(out)["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {int(name[3:]) for name in wanted.values()}
    result = run(chain_folder, "--plan", out / "outpace-plan.json", "--dtype", "fp32", "--out", again, "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["plan"] == plan
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert [(again / name).read_bytes() for name in files] == [(out / name).read_bytes() for name in files]


def test_a_calibrated_folder(chain_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 40)
    options = ("--scheme", "int4", "--method", "gptq", "--smooth", "0.5", "--text", text, "--tokens", "64")
    result = run(chain_folder, *options, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["quantized"] == len(unpacked(tmp_path / "out")) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scheme", "int8", "--dtype", "int8"), "for int8 weights give --scheme int8"),
        (("--scheme", "int8", "--text", "x.txt"), "text: nothing is measured or calibrated"),
        (("--bits-per-weight", "5", "--method", "gptq"), "a plan has a scheme for each weight"),
    ],
)
def test_calibration_and_dtype_that_do_nothing(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = run(*options, "--out", tmp_path / "out")
    assert words in str(result.exception)


def test_a_plan_for_a_model_of_another_class(chain_folder: Path, tmp_path: Path) -> None:
    weight = {"names": ["lm_head.weight"], "shape": [8, 8], "scheme": {"values": "int8"}, "nbytes": 64}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "model": "OtherModel", "dtype": "float32", "weights": [weight]}))
    result = run(chain_folder, "--plan", plan, "--out", tmp_path / "out")
    assert re.match("plan: it was made for a OtherModel, but this is a LlamaForCausalLM", str(result.exception))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--text", "short.txt"),
            r"quant\.calibration\.text: \d+ tokens are too few, at least 16 are needed; give a longer",
        ),
        (("--device", "tpu"), r"device: .*tpu"),
        (("--device", "cuda:99"), r"device: .*cuda:99"),
    ],
)
def test_calibration_that_cannot_run(
    options: tuple[str, ...], words: str, chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("hello world")
    result = run(chain_folder, "--scheme", "int8", "--method", "gptq", "--out", "out", *options)
    assert isinstance(result.exception, OutpaceError), result.output
    assert re.match(words, str(result.exception))
    assert not Path("out").exists()
