"""`outpace shard`: what it writes and what it says."""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outpace.cli.app import app, main
from outpace.loading.open import open_weights
from outpace.loading.read_source import read
from outpace.loading.safetensors_file import SafetensorsWriter
from tests.models import tiny

FILES = ["non_tp.safetensors", "tp_00.safetensors", "tp_01.safetensors"]


def run(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["shard", *map(str, args)])


def test_a_summary_for_people(chain_folder: Path, tmp_path: Path) -> None:
    result = run(chain_folder, "--tp", "2", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "no bar where there is no terminal"
    first, *files = result.stdout.splitlines()
    assert re.fullmatch(rf"{tmp_path / 'out'}: \d+\.\d\d [KM]B in \d+\.\d s \(\d+\.\d\d [KMG]B/s\)", first)
    assert [line.split()[0] for line in files] == FILES


def test_a_summary_for_programs(chain_folder: Path, tmp_path: Path) -> None:
    result = run("-m", chain_folder, "--tp", "2", "--out", tmp_path / "out", "--dtype", "bf16", "--json")
    found = json.loads(result.stdout)
    sizes = {name: (tmp_path / "out" / name).stat().st_size for name in FILES}
    assert found.keys() == {"folder", "files", "bytes", "tokenizer", "seconds", "gb_per_second"}
    assert (found["folder"], found["files"], found["bytes"]) == (str(tmp_path / "out"), sizes, sum(sizes.values()))
    weights = open_weights(tmp_path / "out")
    assert {str(read(source).dtype) for source in weights.sources.values()} == {"torch.bfloat16"}


def test_shards_are_replaced_only_by_force(
    chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(chain_folder, "--tp", "2", "--out", out).exit_code == 0
    monkeypatch.setattr(sys, "argv", ["outpace", "shard", str(chain_folder), "--tp", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert f"error: out: {out} holds shards already; give --force to replace them" in capsys.readouterr().err
    assert (out / "tp_01.safetensors").exists()
    assert run(chain_folder, "--tp", "1", "--out", out, "--force").exit_code == 0
    assert not (out / "tp_01.safetensors").exists()


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    result = run(tmp_path / "model", "--tp", "1", "--out", tmp_path / "out")
    assert result.stdout.splitlines()[-1] == "  no tokenizer: the model has none; put its files into the folder"
    for command in (("generate", "--raw", "x"), ("complete", "x")):
        result = CliRunner().invoke(app, [*command, "--model", str(tmp_path / "out"), "--device", "cpu"])
        assert "put its files into the model's folder" in str(result.exception)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(
    number: signal.Signals, chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*args: object) -> None:
        os.kill(os.getpid(), number)
        threading.Event().wait(600)  # the signal comes when it comes

    monkeypatch.setattr(SafetensorsWriter, "write", write)
    before = signal.signal(number, signal.SIG_DFL)  # whoever starts tests with nohup has it ignored
    try:
        assert run(chain_folder, "--tp", "2", "--out", tmp_path / "out").exit_code == 128 + number
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--out", "x"), "Missing option '--tp'"),
        (("--tp", "2"), "Missing option '--out'"),
        (("--tp", "0", "--out", "x"), "Invalid value for '--tp'"),
        (("--tp", "2", "--out", "x", "--forced"), "Did you mean --force?"),
    ],
)
def test_options_that_cannot_work(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr
