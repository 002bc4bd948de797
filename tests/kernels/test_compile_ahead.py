"""Kernels compiled by several processes, on a machine without a GPU: see tests/kernels/compiling_ahead.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.kernels.compile_ahead import compile_ahead
from outpace.kernels.triton_stub import HAS_TRITON
from tests.patience import PATIENCE

CHECKS = (
    *("collects", "finds", "begins_early", "needs_nothing", "loses_nothing", "restores", "leaves_others_alone"),
    "compiles_nothing",
)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_compiled_ahead(check: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiling_ahead", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "the processes are silent"


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ran: list[int] = []
    compile_ahead([lambda: ran.append(1)])
    assert not ran
