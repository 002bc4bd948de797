"""A mixture of experts behind the server: the tokens are those of plain Hugging Face."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import outpace
from tests.inject.mixtures import mixture
from tests.models import byte_tokenizer
from tests.patience import PATIENCE

PROMPTS = [[5, 9, 33], [7] * 21, [40, 2, 90, 17, 60]]


def test_greedy_tokens_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("qwen2 mixed, windows", vocab_size=258)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    with (
        outpace.serve(tmp_path, device="cpu", dtype="fp32", max_model_len=128, access_log=False) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        answer = client.post("/v1/completions", json={**body, "prompt": PROMPTS}).raise_for_status().json()
    for prompt, choice in zip(PROMPTS, answer["choices"], strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert choice["token_ids"] == want[0, len(prompt) :].tolist()
