"""Worlds of processes on this machine. A start takes seconds: it is shared by many cases, and ranks are forked."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.patience import PATIENCE

Case = tuple[str, str, Mapping[str, Any]]
"""What is done (see `member.KINDS`), to which model, with which options."""


def run_world(size: int, cases: Sequence[Case]) -> dict[str, str]:
    """What was wrong with each case, by its title; empty: nothing."""
    text = json.dumps([{"kind": kind, "name": name, "options": options} for kind, name, options in cases])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common |= {"OUTPACE_JOIN_TIMEOUT": str(PATIENCE), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    first = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.member"],
        env=os.environ | common,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        lines, _ = first.communicate(text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    found = [json.loads(line) for line in lines.splitlines() if line.startswith("[")]
    done = {title(*case): problem for case, (_, problem) in zip(cases, found, strict=False)}
    return {title(*case): done.get(title(*case), "the world ended before this case") for case in cases}


def title(kind: str, name: str, options: Mapping[str, Any]) -> str:
    """A name for a case."""
    return f"{kind}: {name} {json.dumps(options)}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def tp(size: int, **more: Any) -> dict[str, Any]:
    """Options of a config."""
    return {"tensor_parallel": {"tp_size": size, "tp_grain_size": 1}, **more}
