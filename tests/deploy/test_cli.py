"""`outpace deploy`: its flags, its errors, and what it would deploy."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace import ConfigError, NotSupported
from outpace.cli.deploy import options_of
from outpace.cli.flags import config_flags, llm_flags
from outpace.deploy import run as running
from outpace.deploy.options import DeployConfig
from outpace.server.options import ServerConfig
from tests.cli.command import run

Deployed = list[tuple[str | None, Mapping[str, Any], ServerConfig, DeployConfig, bool | None]]


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Deployed:
    """What would have been deployed."""
    calls: Deployed = []

    def deploy(model: Any, llm: Any, server: Any, config: Any, *, wait: Any, console: Any) -> None:
        calls.append((model, llm, server, config, wait))

    monkeypatch.setattr(running, "deploy", deploy)
    return calls


def test_every_option_has_a_flag() -> None:
    shown = run("deploy", "--help").stdout
    flags = [*llm_flags(), *config_flags(ServerConfig), *config_flags(DeployConfig)]
    for name in {name for flag in flags for name in flag.names}:
        assert f"--{name.replace('_', '-')}" in shown
    assert "--wait" in shown
    assert "--detach" in shown


def test_flags_reach_the_three_configs(deployed: Deployed, tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("max-replicas: 4\nport: 9001\nname: chat\nmax-num-seqs: 8\n")
    args = ("folder", "--ray", "--config", file, "--tp", "2", "--port", "9000", "--min-replicas", "2", "--detach")
    result = run("deploy", *args)
    assert result.exit_code == 0, result.output
    ((model, llm, server, config, wait),) = deployed
    assert (model, wait) == ("folder", False)
    assert llm == {"max_num_seqs": 8, "tensor_parallel_size": 2}
    assert (server.port, config.min_replicas, config.max_replicas, config.name) == (9000, 2, 4, "chat")


def test_a_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown name 'max_replica'"):
        options_of({"max_replica": 3}, {})


def test_without_ray_there_is_nowhere_to_deploy() -> None:
    error = run("deploy", "folder").exception
    assert isinstance(error, ConfigError)
    assert "ray: add --ray" in str(error)


def test_ray_that_is_not_installed_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotSupported, match=r"pip install 'outpace\[ray\]'"):
        running.deploy(None, {}, ServerConfig(), DeployConfig(), wait=None, console=Console())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--max-num-seqs", "0"), "max_num_seqs"),
        (("--api-key-file", "/nowhere"), "api_key_file: cannot read"),
        (("--policy", "longest_first"), "scheduler.policy='longest_first': it is for offline work"),
        (("--max-connections", "5"), "max_connections: has no effect"),
        (("--replicas", "2", "--max-replicas", "3"), "replicas: fixes the number"),
    ],
)
def test_wrong_options_are_errors_before_ray_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    def never() -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(running, "require_ray", never)
    error = run("deploy", "folder", "--ray", *args).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)


def test_status_and_stop_take_no_model() -> None:
    error = run("deploy", "folder", "--ray", "--status", "all").exception
    assert isinstance(error, ConfigError)
    assert "give one of them, without a model" in str(error)


@pytest.mark.slow
def test_neither_the_command_line_nor_the_ingress_imports_torch_and_the_former_no_ray() -> None:
    program = (
        "import sys, outpace.cli.app, outpace.cli.deploy, outpace.deploy.run, outpace.deploy.ingress;"
        "found = {name.partition('.')[0] for name in sys.modules} & {'ray', 'torch', 'transformers'};"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
