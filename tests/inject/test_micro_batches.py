"""Steps whose tokens go through a layer in parts: what they give, and that a streamed layer is loaded once for all."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outpace
from outpace.inject import paged
from outpace.inject.paged import Batch, micro_batches
from tests.models import prompts, tiny
from tests.offload.placed import deep, offload_at

PARAMS = outpace.SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)


def answers(model: Any, texts: list[list[int]], **options: Any) -> list[Any]:
    with outpace.LLM(model, device="cpu", num_blocks=64, **options) as llm:
        outputs = llm.generate(texts, PARAMS, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bloom", "mixtral"])
def test_tokens_are_those_of_hugging_face(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = tiny(family), [text.tolist() for text in prompts(5, 17, 1, 9)]
    wanted = []
    for text in texts:
        ids = model.generate(torch.tensor([text]), max_new_tokens=7, do_sample=False, use_cache=True)
        wanted.append(ids[0, len(text) :].tolist())
    monkeypatch.setattr(paged, "MICRO_TOKENS", 6)
    assert answers(model, texts) == wanted


def test_a_streamed_layer_is_loaded_once_for_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, texts = deep("llama"), [text.tolist() for text in prompts(30, 30, 30)]
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "offload": offload_at("host", model, tmp_path)}
    loads = []
    for size in (8192, 10):
        monkeypatch.setattr(paged, "MICRO_TOKENS", size)
        with outpace.LLM(deep("llama"), max_num_batched_tokens=256, **options) as llm:
            streaming = llm.engine.streaming
            assert streaming is not None
            before = streaming.counts.loads
            llm.generate(texts, outpace.SamplingParams(max_tokens=1), use_tqdm=False)
            loads.append((streaming.counts.loads - before, len(streaming.units)))
    assert all(number == units for number, units in loads)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_parts_of_a_batch_are_its_tokens_with_what_they_see(counts: list[int], size: int) -> None:
    counts = [*counts, 1]
    cu_q = torch.tensor([0, *counts]).cumsum(0).int()
    total, before = int(cu_q[-1]), torch.arange(len(counts)).int() * 3
    ids = torch.arange(total)
    lens = before + torch.tensor(counts).int()
    batch = Batch(ids, ids, ids, torch.zeros(len(counts), 1).int(), lens, cu_q, max(counts), 99)
    seen: list[tuple[int, int]] = []
    bounds = [*range(0, total, size), total]
    for begin, end in itertools.pairwise(bounds):
        part = batch.part(slice(begin, end))
        for number in range(len(counts)):
            first, last = int(part.cu_q[number]), int(part.cu_q[number + 1])
            assert last - first <= part.max_q
            for place in range(first, last):  # the last query of a sequence sees all its keys, the one before one less
                seen.append((int(part.ids[place]), int(part.seq_lens[number]) - (last - 1 - place)))
    whole = [
        (int(cu_q[number]) + place, int(before[number]) + place + 1)
        for number, count in enumerate(counts)
        for place in range(count)
    ]
    assert sorted(seen) == sorted(whole)


def test_micro_batches_are_equal_and_none_is_too_large() -> None:
    for tokens in (8193, 16384, 20_000, 65_536):
        parts = [rows.stop - rows.start for rows in micro_batches(tokens)]
        assert sum(parts) == tokens
        assert max(parts) <= paged.MICRO_TOKENS
        assert max(parts) - min(parts) <= 1
