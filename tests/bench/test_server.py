"""`scripts/bench server` on a tiny shape: the folder it writes can be served, and both sides are measured."""

from typing import Any

import pytest
import torch

import bench.server as bench_server
from bench.server import Plan, folder_of, measure
from outpace.bench import shapes
from outpace.loading.read_tokenizer import load_tokenizer

TINY = {
    **shapes.SHAPES["qwen3-0.6b"], "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 33000,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    for where in (shapes, bench_server):
        monkeypatch.setattr(where, "SHAPES", {"tiny": TINY})
    options: dict[str, Any] = {"max_model_len": 256, "dtype": "fp32", "max_num_seqs": 4}
    monkeypatch.setattr(bench_server, "PLANS", {"cpu": Plan((2,), 1, (4, 8), (4, 8), 1, options)})
    monkeypatch.setattr(bench_server, "ALONE", 2)
    return "tiny"


def test_every_token_of_a_shape_has_a_text(tiny: str) -> None:
    with folder_of(tiny, torch.device("cpu")) as folder:
        tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert len(tokenizer) == TINY["vocab_size"]
    assert str(tokenizer.decode([300, 32999])).startswith(" w")


@pytest.mark.slow
def test_both_sides_are_measured(tiny: str) -> None:
    rows, _ = measure(tiny, torch.device("cpu"))
    assert [row["what"].split(":")[0] for row in rows] == ["tiny", "tiny"]
    assert all(row["figure"] > 0 and row["best other"].endswith("(in process)") for row in rows)
