"""`torchrun --nnodes 2` with init_inference, and a world that never fills."""

import os
import sys
from pathlib import Path

import pytest

from tests.models import tiny
from tests.nodes.hosts import Process, free_ports
from tests.patience import PATIENCE

SCRIPT = """
import sys
import torch
import outpace
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
options = dict(device="cpu", dtype="fp32", replace_with_kernel_inject=True)
engine = outpace.init_inference(model, tensor_parallel={"tp_size": 2}, **options)
print("tokens", engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False).tolist(), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("torchrun")
    tiny("llama").save_pretrained(made / "model")
    (made / "script.py").write_text(SCRIPT)
    return made


def test_two_agents_of_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_JOIN_TIMEOUT", str(PATIENCE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    place = "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1))
    script = str(folder / "script.py"), str(folder / "model")
    command = sys.executable, "-m", "torch.distributed.run", *place
    with (
        Process([*command, "--node-rank", "0", *script]) as first,
        Process([*command, "--node-rank", "1", *script]) as second,
    ):
        assert first.code() == second.code() == 0, first.text + second.text
        assert first.wait_for("tokens ") == second.wait_for("tokens ")


def test_a_world_that_never_fills(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
    for name, value in {**given, "OUTPACE_JOIN_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with Process([sys.executable, str(folder / "script.py"), str(folder / "model")]) as alone:
        assert alone.code() == 1
        alone.wait_for(
            f"outpace.errors.EngineDead: not all 2 ranks connected to 127.0.0.1 port {given['MASTER_PORT']} within 1 s"
        )
