"""Layers in two halves, each with pages of its own: where a pipeline stage ends, or a streamed layer arrives."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.cache.kv_cache import allocate
from outpace.inject.paged import Batch, PagedModel
from tests.inject.checks import CPU, injected_copy, randomised
from tests.models import VOCAB, tiny

LENGTH = 11
GEMMA = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"num_hidden_layers": 3}), ("gemma3", GEMMA), ("bloom", {}), ("gpt2", {})]
)
def test_two_stages_compute_what_one_does(family: str, changes: dict[str, Any]) -> None:
    model, injected = injected_copy(randomised(tiny(family, **changes)))
    ids = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))
    batch = _whole(ids)
    halves = [replace(injected, layers=part) for part in (injected.layers[:1], injected.layers[1:])]
    with torch.no_grad():
        whole = PagedModel(model, injected, LENGTH)
        expected = whole.forward(batch, allocate(whole.kv_heads, 1, whole.dtype, CPU))
        first, second = (PagedModel(model, half, LENGTH) for half in halves)
        x = first.embed(batch)
        for stage, half in zip((first, second), halves, strict=True):
            pages = allocate(stage.kv_heads, 1, stage.dtype, CPU)
            assert len(pages.keys) == len(half.layers)
            x = stage.blocks(x, batch, pages, iter(half.layers))
        assert torch.equal(second.head(x), expected)


def _whole(ids: torch.Tensor) -> Batch:
    """One sequence, from its first token on."""
    places, length = torch.arange(len(ids)), len(ids)
    lens, cu_q = torch.tensor([length], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
    return Batch(ids, places, places, torch.zeros(1, 1, dtype=torch.int32), lens, cu_q, max_q=length, max_len=length)
