"""`scripts/bench inject` with tiny models: what is measured, and that it is the work that other systems did."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertModel

import outpace
from bench import inject
from outpace.bench.shapes import build
from outpace.kernels.limits import Speed
from tests.models import tiny

SPEED = Speed(1e9, 1e10)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "PROMPT", 12)
    monkeypatch.setattr(inject, "NEW", 24)


def test_parts_of_a_shape() -> None:
    rows, _ = inject.measure_generate("tiny", SPEED)
    assert [row["what"] for row in rows] == [
        *("tiny: inject", "tiny: first call (kernels compiled)", "tiny: decode", "tiny: prefill 12"),
    ]
    decode, prefill = rows[2:]
    size = sum(weight.nbytes for weight in build("tiny", torch.float32, "cpu").parameters()) - 4 * 256 * 32
    pages = 2 * 2 * 2 * 8 * 4 * (12 + 24 / 2)  # layers, K and V, heads, head size, bytes, tokens
    assert decode["limit"] == pytest.approx(SPEED.bandwidth / (size + pages), rel=1e-3)
    assert prefill["limit"] == pytest.approx(1e3 * size / SPEED.bandwidth)


def test_a_forward_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache would be copied out of the graph, tensor by tensor."""
    outputs: list[Any] = []
    init = outpace.init_inference

    def watched(model: nn.Module, **options: Any) -> Any:
        engine = init(model, **options)
        engine.module.register_forward_hook(lambda module, args, output: outputs.append(output))
        return engine

    monkeypatch.setattr(outpace, "init_inference", watched)
    (row,), _ = inject.measure_forward("tiny", SPEED)
    assert row["limit"] > 0
    assert outputs
    assert all(output.past_key_values is None for output in outputs)


def test_bert_large_is_as_large_as_its_name_says() -> None:
    with torch.device("meta"):
        large = BertModel(inject.BERT_LARGE)
    assert sum(weight.numel() for weight in large.parameters()) == pytest.approx(335e6, rel=0.01)
    row = inject._beside_eager("bert", tiny("bert"), torch.float32, {"input_ids": inject.prompt(8, 90)})
    assert (row["what"], row["limit"]) == ("bert", "-")
