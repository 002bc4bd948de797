"""Pages of some layers in host memory: contexts that the device has no room for."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outpace
from outpace import ConfigError, SamplingParams
from outpace.cache.kv_cache import block_bytes
from outpace.runner import room
from outpace.runner.room import layers_on_host
from tests.models import prompts, tiny
from tests.offload.placed import deep

PARAMS = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10**6))
def test_as_few_layers_as_possible_and_never_more_than_the_room(layers: int, blocks: int, room: int) -> None:
    heads = [(2, 8, 8)] * layers
    away = layers_on_host(heads, torch.float32, 16, blocks, room)
    one = blocks * block_bytes(heads[:1], torch.float32, 16)
    assert len(set(away)) == len(away)
    near = layers - len(away) + bool(away)  # and room for one that comes
    assert near * one <= room or len(away) == layers
    assert not away or (layers - len(away) + 1 + (len(away) > 1)) * one > room


@pytest.mark.parametrize("kind", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_tokens_are_those_of_pages_on_the_device(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text.tolist() for text in prompts(30, 5, 41)]
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 12, "block_size": 16, "kv_cache_dtype": kind}
    found = []
    both: list[dict[str, Any]] = [{}, {"offload": {"host_pages": "1GB"}}]
    for more in both:
        with outpace.LLM(deep(family), **options, **more) as llm:
            assert bool(llm.engine._runner._pages.away) == bool(more)
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        monkeypatch.setattr(room, "on_host", lambda *args: 50_000)
    assert found[0] == found[1]


def test_a_context_longer_than_the_device_has_pages_for() -> None:
    model, text = deep("llama", max_position_embeddings=256), prompts(150)[0].tolist()
    wanted = model.generate(torch.tensor([text]), max_new_tokens=9, do_sample=False)[0, 150:].tolist()
    page = block_bytes([(2, 8, 8)] * 7, torch.float32, 16)
    options: dict[str, Any] = {"device": "cpu", "block_size": 16, "cpu_cache_space": 5 * page / 2**30}
    with (
        outpace.LLM(deep("llama", max_position_embeddings=256), **options) as llm,
        pytest.raises(outpace.InputError, match="do not fit the cache of 80 tokens"),
    ):
        llm.generate([text], PARAMS, use_tqdm=False)
    with outpace.LLM(model, **options, offload={"host_pages": 10 * page}) as llm:
        assert llm.engine._runner._pages.away
        assert llm.generate([text], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == wanted


def test_too_many_pages_are_refused_with_the_bytes() -> None:
    with pytest.raises(ConfigError, match=r"num_blocks=99999.*offload.host_pages.*give less, or raise host_pages"):
        outpace.LLM(tiny("llama"), device="cpu", num_blocks=99999, offload={"host_pages": "1MB"})
