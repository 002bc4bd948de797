"""Real Ray clusters on this machine: the rows of `scripts/soak --ray`, shortened; a cluster that the command starts."""

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench.soak.cluster import cluster
from bench.soak.ray_rows import RAY_ROWS
from bench.soak.row import Soak
from bench.soak.server import write_model
from tests.patience import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray Serve is not installed (outpace[ray]); scripts/soak --ray installs it and runs these rows",
    ),
]


@pytest.mark.parametrize("row", RAY_ROWS)
def test_rows_on_a_real_cluster(row: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("c")  # a short name: Ray's sockets are in it
    write_model(folder / "model", 256, 4)

    async def run() -> None:
        soak = Soak(folder / "model", folder / "model", minutes=2)
        async with cluster(folder) as made:
            result = await RAY_ROWS[row](soak, made)
        assert result.passed, result.measured

    asyncio.run(run())


def test_a_cluster_that_is_started_here_serves_until_a_signal_and_is_gone(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 32, 2)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ("deploy", str(tmp_path / "model"), "--ray", "--address", "local", "--device", "cpu", "--port", str(port))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "outpace", *command], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not re.search(r"^http://", said, re.MULTILINE):
                line = process.stderr.readline()
                assert line, said
                said += line
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=PATIENCE
            )
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    with contextlib.closing(socket.socket()) as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0
