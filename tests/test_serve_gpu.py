"""`outpace serve` on a GPU: the answers of `LLM`, a kill that heals, and an engine that ends with its server."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import outpace
from tests.models import byte_tokenizer, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PATIENCE = 60.0
BODY = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def write_model(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    tiny("llama", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def engine_of(pid: int) -> int:
    """The engine process of a server."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    (engine,) = (
        child for child in found if b"outpace.server.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return engine


def test_f1_a_server_answers_like_llm_heals_and_ends(tmp_path: Path) -> None:
    write_model(tmp_path)
    options: dict[str, Any] = {"dtype": "fp32", "num_gpu_blocks_override": 200}
    with outpace.LLM(tmp_path, device="cuda", **options) as llm:
        params = outpace.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        (wanted,) = llm.generate(["hello"], params, use_tqdm=False)
    with (
        outpace.serve(tmp_path, device="cuda", **options) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == wanted.outputs[0].text
        engine = engine_of(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        begin = time.monotonic()
        while client.get("/health/ready").status_code == 200:
            assert time.monotonic() - begin < PATIENCE
        while client.get("/health/ready").status_code != 200:
            assert time.monotonic() - begin < PATIENCE
            time.sleep(0.05)
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == wanted.outputs[0].text
        second = engine_of(server.process.pid)
        assert second != engine
    assert not Path(f"/proc/{second}").exists()  # nor its memory on the device
