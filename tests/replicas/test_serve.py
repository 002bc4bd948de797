"""`outpace serve --replicas N` before and behind the router: options, what each replica is told, what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.serve import options_of
from outpace.errors import ConfigError
from outpace.replicas.serve_replicas import options_of_replica
from outpace.server.exit_codes import WRONG_OPTION
from outpace.server.launch import launch
from outpace.server.options import ServerConfig


def test_a_replica_has_the_same_options_but_for_what_the_router_does() -> None:
    given: dict[str, Any] = {
        "replicas": 3,
        "host": "0.0.0.0",
        "port": 80,
        "api_keys": ["secret", "other"],
        "ssl_certfile": "a.pem",
        "ssl_keyfile": "b.pem",
        "served_model_name": ["name"],
        "max_body_bytes": 5000,
        "root_path": "/llm",
    }
    config = ServerConfig(**given)
    told = json.loads(json.dumps(options_of_replica(config)))
    _, llm, of_replica = options_of(told)
    assert llm == {}
    assert of_replica.all_api_keys() == config.all_api_keys() == ("secret", "other")
    assert (of_replica.replicas, of_replica.is_local, of_replica.ssl_certfile) == (1, True, None)
    assert of_replica.hosts() == (), "the router has looked at the name"
    assert of_replica.served_model_name == ("name",)
    assert (of_replica.max_body_bytes, of_replica.root_path) == (5000, "/llm")
    assert of_replica.connections_per_address >= config.max_connections, "all come from the router"
    assert of_replica.max_headers > config.max_headers, "the router adds some"


@pytest.mark.parametrize("count", [0, 65, "x"])
def test_a_number_that_cannot_be(count: Any) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ServerConfig(replicas=count)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": 2, "master_addr": "127.0.0.1", "tensor_parallel_size": 2}, "replicas: 2 replicas on one machine"),
        ({"device": "cuda:0"}, "device: 'cuda:0' is one device"),
    ],
)
def test_what_cannot_be_combined_is_said_before_anything_starts(
    options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(None, options, ServerConfig(replicas=2, port=0)) == WRONG_OPTION
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {said}")


def test_a_model_that_no_replica_can_load_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    code = "import sys; from outpace.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(tmp_path), "--port", "0", "--replicas", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, outpace.replicas.serve_replicas\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'fastapi'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
