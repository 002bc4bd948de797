"""The command line: what it prints, where, and how it fails."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace import InputError, OutpaceError, __version__
from outpace.cli.app import main
from tests.cli.command import Main, run
from tests.models import CYCLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    return tmp_path


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"outpace {__version__}\n")


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "info", "models", "verify"):
        assert command in result.stdout


@pytest.mark.parametrize("program", [("-m", "outpace"), ("-c", "from outpace.cli import main; main()")], ids=str)
def test_ctrl_c_while_packages_are_imported_ends_it_quietly(program: tuple[str, ...], tmp_path: Path) -> None:
    # a package that the command imports first stands for a slow import
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = subprocess.run(
        [sys.executable, *program, "generate", "hi"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


# generate


def test_the_answer_is_on_standard_output_and_the_figures_on_standard_error(chain_folder: Path) -> None:
    result = run("generate", "hello", "--model", chain_folder, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{CYCLE}\n"
    assert re.search(r"chain on cpu in float32 \(the checkpoint's own\)", result.stderr)
    assert re.search(r"21 prompt tokens, 21 new \(stop\) · [\d.]+ tokens/s · first token after \d+ ms", result.stderr)
    assert re.search(r"ready after [\d.]+ s", result.stderr)


def test_a_raw_prompt_has_no_template(chain_folder: Path) -> None:
    result = run("generate", "--raw", "-m", chain_folder, "--device", "cpu", "E")
    assert result.stdout == "NDx\n"
    assert "1 prompt tokens, 4 new (stop)" in result.stderr


def test_a_system_prompt(chain_folder: Path) -> None:
    result = run("generate", "hello", "-m", chain_folder, "--system", "be kind", "--device", "cpu")
    assert f"{21 + len('system=be kind;')} prompt tokens" in result.stderr


def test_the_prompt_from_standard_input(chain_folder: Path) -> None:
    result = run("generate", "-", "--raw", "-m", chain_folder, "--device", "cpu", stdin="quiet E")
    assert result.stdout == "NDx\n"
    assert "7 prompt tokens" in result.stderr


def test_standard_input_that_is_not_utf_8_is_refused_before_the_model_is_looked_for() -> None:
    result = run("generate", "-", "-m", "/no/such/model", stdin=b"caf\xe9 au lait")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == "prompt: standard input is not UTF-8 from byte 3 on; give it as UTF-8"


def test_a_reader_that_has_gone_ends_it_quietly(
    chain_folder: Path, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:  # which closes without an error: what is left goes nowhere
        monkeypatch.setattr(sys, "stdout", pipe)
        code, _, err = run_main("generate", "?", "--raw", "-m", chain_folder, "--device", "cpu")
    assert code == 141
    assert "Error" not in err
    assert "new (" not in err  # nor figures of an answer that was cut off


def test_options_of_sampling(chain_folder: Path) -> None:
    options = ("-m", chain_folder, "--device", "cpu", "--raw")
    short = run("generate", "?", *options, "--max-tokens", "5")
    assert short.stdout == "world\n"
    assert "5 new (length)" in short.stderr
    hot = ("--temperature", "50", "--max-tokens", "11")
    first, second, third = (run("generate", "?", *options, *hot, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == second != third
    assert run("generate", "?", *options, *hot, "--top-k", "1").stdout == "world é日\n"
    assert run("generate", "?", *options, *hot, "--top-p", "0.000001").stdout == "world é日\n"


def test_one_token_has_no_speed(chain_folder: Path) -> None:
    result = run("generate", "?", "--raw", "-m", chain_folder, "--device", "cpu", "--max-tokens", "1")
    assert "one token" in result.stderr


def test_the_dtype_is_used_and_said(chain_folder: Path) -> None:
    result = run("generate", "?", "--raw", "-m", chain_folder, "--dtype", "bf16", "--device", "cpu")
    assert "in bfloat16 (asked for)" in result.stderr
    assert result.stdout == f"{CYCLE}\n"


@pytest.mark.real
def test_the_default_model(default_model_folder: Path) -> None:
    prompt = "What is the capital of France? Answer in one sentence."
    result = run("generate", prompt, "--max-tokens", "12", "--device", "cpu", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout
    assert "SmolLM2-135M-Instruct on cpu in float32" in result.stderr


# info and models


def test_info_says_what_would_be_used_and_why(cache: Path) -> None:
    result = run("info")
    assert result.exit_code == 0
    titles = ("Machine", "Versions", "What is used here", "Which quantization runs fast here")
    for said in (*titles, __version__, "torch", "transformers", str(cache)):
        assert said in result.stdout
    assert re.search(r"device .*(cpu|cuda).*torch sees", result.stdout)
    assert re.search(r"dtype .*float(32|16).*init_inference: ", result.stdout)


def test_info_as_json_says_which_quantization_runs_fast() -> None:
    found = json.loads(run("info", "--json").stdout)
    assert found["versions"]["outpace"] == __version__
    assert {"device", "dtype"} <= {each["what"] for each in found["choices"]}
    assert [each["scheme"] for each in found["schemes"]] == ["int8", "int4", "w8a8", "fp8"]
    assert all(each["why"] for each in found["schemes"])


def test_info_of_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.cli.info.PACKAGES", ("no-such-package",))
    assert re.search(r"no-such-package .*not installed", run("info").stdout)


def test_models_of_an_empty_cache(cache: Path) -> None:
    result = run("models")
    assert result.exit_code == 0
    assert f"No models in {cache} yet: outpace generate hello fetches the default one." in result.stdout


def test_models_of_a_filled_cache(cache: Path) -> None:
    facts: dict[str, Any] = {"some-model": {"dtype": "float16", "source": "PyPI [/]"}, "bare": None, "odd": [1]}
    (cache / "models" / "empty").mkdir(parents=True)
    for name, provenance in facts.items():
        (cache / "models" / name).mkdir(parents=True)
        (cache / "models" / name / "config.json").touch()
        (cache / "models" / name / "model.safetensors").write_bytes(bytes(3 * 2**20))
        if provenance:
            (cache / "models" / name / "outpace.json").write_text(json.dumps(provenance))
    result = run("models")
    assert str(cache) in result.stdout.replace("\n", "").replace(" ", "")
    assert re.search(r"bare .*3 MiB.*unknown.*unknown", result.stdout)
    assert re.search(r"some-model .*3 MiB.*float16.*PyPI \[/\]", result.stdout)
    assert re.search(r"odd .*3 MiB.*unknown.*unknown", result.stdout)
    assert "empty" not in result.stdout


@pytest.mark.parametrize("args", [("models",), ("generate", "hi", "--device", "cpu")])
def test_a_cache_that_is_a_file(
    args: tuple[str, ...], run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("OUTPACE_CACHE", str(file))
    said = f"error: OUTPACE_CACHE: {file} is a file; set OUTPACE_CACHE to a folder\n"
    assert run_main(*args) == (1, "", said)


# errors


def test_an_error_is_one_line_and_exit_code_1(run_main: Main, tmp_path: Path) -> None:
    code, out, err = run_main("generate", "hi", "--model", tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert err.startswith("error: model: no such file or folder")
    assert len(err.splitlines()) == 1


def test_an_error_may_hold_brackets(run_main: Main) -> None:
    code, _, err = run_main("generate", "hi", "--model", "./[bold]nothing[/]")
    assert code == 1
    assert "[bold]nothing[/]" in err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["outpace", "--debug", "generate", "hi", "--model", str(tmp_path / "nothing")])
    with pytest.raises(OutpaceError, match="no such file or folder"):
        main()


def test_an_interrupt_is_exit_code_130(run_main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.cli.app.app", interrupted)
    assert run_main("info")[0] == 130


@pytest.mark.parametrize(
    "args",
    [
        ("generat",),
        ("generate",),
        ("generate", "hi", "--max-tokens", "many"),
        ("generate", "hi", "--max-tokens", "0"),
        ("--what",),
    ],
)
def test_a_wrong_command_is_exit_code_2(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("serve", "--port", "99999"), 2, "error: port: input should be less than or equal to 65535, got 99999"),
        (("serve", "--dtype", "int4"), 2, "error: dtype: 'int4' is not a dtype Outpace runs in; use one of"),
        (("serve", "--pipeline-parallel-size", "0"), 2, "error: pipeline_parallel_size: "),
        (("serve", "/no/such/model"), 1, "error: model: no such file or folder"),
        (("generate", "hi", "--dtype", "int4"), 2, "error: dtype: 'int4'"),
        (("generate", "hi", "--temperature", "-1"), 2, "error: temperature: "),
        (("shard", "--tp", "2", "--out", "x", "--dtype", "int4"), 2, "error: dtype: 'int4' is not a dtype"),
        (
            ("shard", "--tp", "2", "--out", "x", "--dtype", "int8"),
            2,
            "error: dtype=int8: sharding of quantized weights is not in",
        ),
        (("shard", "--tp", "2", "--out", "/no/such/folder"), 2, "error: out: there is no folder /no/such; make it"),
        (("bench", "serve", "--url", "localhost"), 2, "error: url: expected http"),
    ],
)
def test_item_19_exit_code_2_is_an_option_that_cannot_work_and_1_all_else(
    args: tuple[str, ...], code: int, said: str, run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.server.logs.set_up", lambda as_json: None)
    found, out, err = run_main(*args)
    assert (found, out) == (code, "")
    assert err.startswith(said)
    assert len(err.splitlines()) == 1


COMMANDS = (
    *("chat", "complete", "deploy", "eval", "generate", "info", "models", "plan", "probe", "quantize", "run-batch"),
    *("serve", "shard", "verify"),
)
BENCHES = ("bench throughput", "bench latency", "bench serve")


@pytest.mark.parametrize("command", ["", *COMMANDS, "bench", *BENCHES])
def test_item_19_help_shows_flags_without_a_type(command: str) -> None:
    shown = run(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "bool" not in shown.stdout
    assert re.search(r"^  --help  +Show this message and exit\.$", shown.stdout, re.MULTILINE)


def test_item_19_the_list_of_commands_says_whole_sentences() -> None:
    lines = run("--help").stdout.split("Commands:\n")[1].strip().splitlines()
    assert len(lines) == len(COMMANDS) + 1
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize("command", ["chat", "complete", "generate", "run-batch", "serve", "verify", *BENCHES])
def test_item_19_every_command_takes_the_model_by_the_same_name(command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert "-m, --model MODEL" in shown
    if "The same as MODEL." not in shown:
        assert "[MODEL]" not in shown
        return
    files = ["in", "out"] if command == "run-batch" else []
    result = run(*command.split(), *files, "/no/one", "--model", "/no/other")
    assert "model: given twice, '/no/one' and --model '/no/other'; give it once" in str(result.exception)


@pytest.mark.parametrize("command", ["verify", "bench latency", "bench throughput", "chat"])
def test_item_19_the_model_that_is_named_is_used(command: str) -> None:
    for words in (("-m", "/no/one"), ("--model=/no/one",), ("/no/one",)):
        result = run(*command.split(), *words, "--device", "cpu")
        assert "model: no such file or folder '/no/one'" in str(result.exception)


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (("--verison",), "--version"),
        (("serve", "--prot", "3"), "--port"),
        (("serve", "--max-model-length", "3"), "--max-model-len"),
        (("serve", "--max-num-sequences", "3"), "--max-num-seqs"),
        (("serve", "--max-len", "3"), "--max-model-len"),
        (("serve", "--enable-chunked-prefill"), None),
        (("serve", "--trust-remote-code"), None),
        (("generate", "hi", "--token", "3"), "--max-tokens"),
        (("bench", "throughput", "--num-prompt", "3"), "--num-prompts"),
        (("models", "--all"), None),
    ],
)
def test_item_19_an_unknown_flag_is_refused_with_the_one_that_was_meant(
    args: tuple[str, ...], meant: str | None
) -> None:
    result = run(*args)
    name = next(arg for arg in args if arg.startswith("--"))
    assert result.exit_code == 2
    said = result.stderr.splitlines()[-1]
    assert said == f"Error: No such option: {name}." + (f" Did you mean {meant}?" if meant else "")


def test_item_19_no_progress_bars_where_standard_error_is_no_terminal(chain_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("{}")
    result = run("run-batch", tmp_path / "in", tmp_path / "out", "--url", "http://127.0.0.1:9")
    assert result.stderr == "0 answered, 1 failed, 0 were there\n"
    result = run("generate", "?", "--raw", "-m", chain_folder, "--device", "cpu")
    assert len(result.stderr.splitlines()) == 2, result.stderr


def test_verbose_says_every_choice(chain_folder: Path) -> None:
    import logging

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers = []
    try:
        result = run("-v", "generate", "?", "--raw", "-m", chain_folder, "--device", "cpu")
    finally:
        root.handlers = handlers
        root.setLevel(level)
    assert result.stdout == f"{CYCLE}\n"
    assert re.search(r"dtype: .*float32 \(the checkpoint's own\)", result.stderr)
    assert re.search(r"device: cpu \(asked for\)", result.stderr)


def test_the_text_is_written_as_it_comes(chain_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pieces(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())

    shown: list[str] = []
    monkeypatch.setattr(sys, "stdout", Pieces())
    monkeypatch.setattr(sys, "argv", ["outpace", "generate", "?", "--raw", "-m", str(chain_folder), "--device", "cpu"])
    with pytest.raises(SystemExit):
        main()
    assert [text for text in shown if text][:3] == ["w", "wo", "wor"]


# as people run it


def outpace(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from outpace.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own() -> None:
    assert outpace("--version").stdout == f"outpace {__version__}\n"
    failed = outpace("--debug", "generate", "hi", "--model", "/nothing/here")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "Traceback" in failed.stderr
    assert "ModelError: model: no such file or folder" in failed.stderr
