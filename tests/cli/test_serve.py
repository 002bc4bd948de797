"""`outpace serve`: flags from the configs, config files, the whole server as people run it, and the Python calls."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from outpace import ConfigError, InputError, ModelError, StateError
from outpace.cli.flags import config_flags, llm_flags
from outpace.cli.serve import options_of, read_config
from outpace.config import LLMConfig
from outpace.server import python_api
from outpace.server.logs import JsonLines
from outpace.server.options import ServerConfig
from tests.cli.command import run
from tests.models import CYCLE
from tests.patience import PATIENCE

Ran = list[tuple[str | None, Mapping[str, Any], ServerConfig]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """What the server would have been started with."""
    calls: Ran = []

    def start(model: str | None, options: Mapping[str, Any], config: ServerConfig) -> int:
        calls.append((model, options, config))
        return 3

    monkeypatch.setattr("outpace.server.launch.launch", start)
    monkeypatch.setattr("outpace.server.logs.set_up", lambda as_json: None)
    return calls


# flags


def test_every_option_of_both_configs_has_a_flag() -> None:
    engine, server = llm_flags(), config_flags(ServerConfig)
    names = [name for flag in (*engine, *server) for name in flag.names]
    assert len(names) == len(set(names))
    assert {*LLMConfig.flat, "dtype", "device", "seed", "deterministic", "enforce_eager"} <= set(names)
    assert set(ServerConfig.model_fields) <= set(names)
    shown = run("serve", "--help").stdout
    for name in names:
        assert f"--{name.replace('_', '-')}" in shown
    assert "Maximum number of requests in one step." in shown


def test_flags_reach_the_configs(ran: Ran) -> None:
    args = (
        "serve",
        "folder",
        "--max-num-seqs",
        "8",
        "--block-size",
        "32",
        "--no-enable-prefix-caching",
        "--dtype",
        "fp16",
    )
    more = ("--port", "0", "--api-key", "a", "--api-keys", "b", "--served-model-name", "x", "--no-docs", "-tp", "1")
    result = run(*args, *more, "--gpu-memory-utilization", "0.5", "--enforce-eager", "--dtype", "fp16")
    assert result.exit_code == 3, result.output
    ((model, llm, server),) = ran
    assert model == "folder"
    assert llm == {
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": False,
        "dtype": "fp16",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
    }
    assert (server.port, server.all_api_keys(), server.served_model_name) == (0, ("a", "b"), ("x",))
    assert (server.docs, server.metrics) == (False, True)


def test_without_flags_there_are_only_defaults(ran: Ran) -> None:
    assert run("serve").exit_code == 3
    assert ran == [(None, {}, ServerConfig())]


@pytest.mark.parametrize("args", [("--no-such-flag",), ("--port", "many"), ("a", "b")])
def test_a_wrong_flag_is_exit_code_2(args: tuple[str, ...], ran: Ran) -> None:
    result = run("serve", *args)
    assert (result.exit_code, ran) == (2, [])
    assert "Usage: " in result.stderr
    assert args[0] in result.stderr or "unexpected extra argument" in result.stderr


def test_a_wrong_value_of_the_server_is_said_before_anything_starts(ran: Ran) -> None:
    result = run("serve", "--port", "70000")
    assert isinstance(result.exception, ConfigError)
    assert "port: " in str(result.exception)
    assert ran == []


@pytest.mark.slow
def test_help_of_everything_does_not_wait_for_torch() -> None:
    code = (
        "import sys, outpace.cli.app as a\ntry:\n a.main()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


# config files


def test_flags_win_over_the_file_by_whatever_name(ran: Ran, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: from-file\nmax-model-len: 100\ncache: {block_size: 16, num_blocks: 7}\napi-key: [one, two]\nport: 1\n"
    )
    assert run("serve", "--config", tmp_path / "c.yaml").exit_code == 3
    flags = ("--max-model-len", "9", "--block-size", "64", "--api-key", "k", "--port", "2")
    assert run("serve", "named", "--config", tmp_path / "c.yaml", *flags).exit_code == 3
    (first, second) = ran
    assert first[0] == "from-file"
    assert first[1] == {"max_model_len": 100, "cache": {"block_size": 16, "num_blocks": 7}}
    assert (first[2].port, first[2].all_api_keys()) == (1, ("one", "two"))
    assert second[0] == "named"
    config = LLMConfig.of(dict(second[1]))
    assert (config.max_out_tokens, config.cache.block_size, config.cache.num_blocks) == (9, 64, 7)
    assert (second[2].port, second[2].all_api_keys()) == (2, ("k",))


def test_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"max-num-seqs": 4, "log_json": true}')
    model, llm, server = options_of(read_config(tmp_path / "c.json"))
    assert (model, llm, server.log_json) == (None, {"max_num_seqs": 4}, True)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "max_num_seq: 4", "unknown name 'max_num_seq': did you mean 'max_num_seqs'?"),
        ("c.yaml", "zzz: 4", "unknown name 'zzz'; `outpace serve --help` lists the options"),
        ("c.yaml", "port: 1\nport: 2", "port is given twice"),
        ("c.json", '{"port": 1, "port": 2}', "port is given twice"),
        ("c.yaml", "log-json: true\nlog_json: false", "log_json is given twice"),
        ("c.yaml", "a: [", "cannot be read: while parsing"),
        ("c.json", "{", "cannot be read: "),
        ("c.yaml", "- a", "must hold names and values, not list"),
        ("c.yaml", "model: 3", "model: expected a name or a path, got 3"),
        ("c.toml", "", "is neither .yaml nor .json"),
        ("c.yaml", "!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_files_that_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        options_of(read_config(tmp_path / name))
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "none.yaml")


# the log


def test_log_lines_as_json() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.Logger("outpace.access")
    log.addHandler(handler)
    log.info("%(path)s took %(milliseconds).1f", {"path": "/v1", "milliseconds": 2.5})
    log.warning("it is %s", "late")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["path"], first["milliseconds"], first["level"]) == ("/v1", 2.5, "info")
    assert second["message"] == "it is late"
    assert "ValueError: no" in third["traceback"]


# as people run it


@pytest.fixture
def server(chain_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    code = "from outpace.cli import main; main()"
    args = ["serve", str(chain_folder), "--device", "cpu", "--port", "0", "--api-key", "secret", "--log-json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        for said in process.stderr:
            if found := re.match(r"(http://127\.0\.0\.1:\d+)$", said):
                break
        else:
            raise AssertionError("it ended before it was ready")
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_a_server_answers_and_ends_with_0(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    with OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        name = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hello"}], stream=True, temperature=0
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == CYCLE
    assert len([piece for piece in pieces if piece]) > 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert process.stderr is not None
    lines = [json.loads(line) for line in process.stderr if line.startswith("{")]
    assert {"/v1/models", "/v1/chat/completions"} <= {line.get("path") for line in lines}


# the Python calls


@pytest.mark.slow
def test_serve_and_client(chain_folder: Path) -> None:
    with python_api.serve(chain_folder, device="cpu", api_key="secret") as server:
        assert server.process.stdin is not None
        assert server.process.poll() is None
        answers = server.generate(["E", "x?", "E"], do_sample=False, max_new_tokens=5)
        assert [str(answer) for answer in answers] == ["NDx", "world", "NDx"]
        assert (answers[1].prompt_length, answers[1].generated_length, answers[1].finish_reason) == (2, 5, "length")
        with pytest.raises(InputError, match="no_such_option"):
            server.generate("E", no_such_option=1)
        with python_api.client(server.url, api_key="wrong") as other, pytest.raises(InputError, match="key"):
            other.generate("E")
        with python_api.client(server.url + "/v1", api_key="secret") as other:
            assert other("E", do_sample=False)[0].generated_text == "NDx"
        server.process.stdin.close()  # as if this process had died
        assert server.process.wait(PATIENCE) == 0
    assert server.terminate() == 0
    with python_api.client(server.url) as gone, pytest.raises(StateError, match="cannot be reached"):
        gone.generate("E")


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        python_api.serve("/no/such/model", device="cpu")


def test_options_of_serve_are_checked_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match="unknown name 'max_num_seq'"):
        python_api.serve("x", max_num_seq=3)
    with pytest.raises(ConfigError, match="not a plain value"):
        python_api.serve("x", max_num_seqs=object())
    with pytest.raises(InputError, match="url: expected"):
        python_api.client("localhost:8000")


# the guide


GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
COMMANDS = re.findall(r"^outpace (bench serve|[\w-]+) ?(.*?)(?: +#.*)?$", GUIDE, re.MULTILINE)


@pytest.mark.parametrize("command", sorted({name for name, _ in COMMANDS}))
def test_commands_of_the_guide_have_the_flags_they_use(command: str) -> None:
    known = set(re.findall(r"--[\w-]+", run(*command.split(), "--help").stdout))
    used = {flag for name, rest in COMMANDS if name == command for flag in re.findall(r"(?<!\S)--[\w-]+", rest)}
    assert used <= known
    assert command != "serve" or used


def test_flags_that_the_guide_promises_are_there() -> None:
    known = {
        f"--{name.replace('_', '-')}" for flag in (*llm_flags(), *config_flags(ServerConfig)) for name in flag.names
    }
    limits = GUIDE.split("## Limits")[1].split("## Ending")[0]
    shared = GUIDE.split("with the same names for:")[1].split("What differs")[0]
    promised = set(re.findall(r"`(--[\w-]+)`", limits + shared)) - {"--config"}
    assert len(promised) > 30
    assert promised <= known
