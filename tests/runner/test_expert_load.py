"""Tokens of each expert: all that ran and no padding, read without disturbing steps, right after 2^32 of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outpace.bench.shapes import build
from outpace.inject.experts import MixtureOfExperts
from outpace.llm import LLM
from outpace.runner import expert_load
from outpace.types import SamplingParams
from tests.models import tiny

CPU: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
TOP_K = 2


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(build("tiny-moe", torch.float32, "cpu"), **CPU) as made:
        yield made


def ask(llm: LLM, *lengths: int, new: int = 5) -> None:
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    llm.generate([list(range(5, 5 + length)) for length in lengths], params, use_tqdm=False)


def test_every_token_counts_top_k_times_in_every_layer(llm: LLM) -> None:
    assert llm.expert_load().tolist() == [[0] * 8, [0] * 8]  # what the start ran was padding
    ask(llm, 4, 9)
    load = llm.expert_load()
    assert load.dtype == torch.int64
    assert load.sum(dim=1).tolist() == [TOP_K * (4 + 9 + 2 * 4)] * 2  # the last token of an answer is not computed
    ask(llm, 3)
    assert (llm.expert_load() - load).sum(dim=1).tolist() == [TOP_K * (3 + 4)] * 2
    assert torch.equal(llm.expert_load(), llm.expert_load())


def test_counts_are_those_of_the_router(llm: LLM) -> None:
    mixtures = [each for each in llm.engine._parts.module.modules() if isinstance(each, MixtureOfExperts)]
    chosen: list[torch.Tensor] = []
    mixtures[1].router.register_forward_hook(lambda module, args, output: chosen.append(output[2].flatten()))
    ask(llm, 6, 2)
    found = torch.cat(chosen)
    assert torch.equal(llm.expert_load()[1], torch.bincount(found[found >= 0], minlength=8))


def test_any_number_of_experts() -> None:
    made = LLM(tiny("mixtral", num_local_experts=6), **CPU)
    ask(made, 4, new=2)
    assert made.expert_load().shape == (2, 6)
    assert made.expert_load().sum(dim=1).tolist() == [TOP_K * 5] * 2


def test_layers_without_experts_have_no_row() -> None:
    dense = LLM(tiny("llama"), device="cpu", max_model_len=32)
    assert dense.engine.experts is None
    assert dense.expert_load().shape == (0, 0)


def test_what_was_asked_for_is_told_once_and_is_of_that_time(llm: LLM) -> None:
    load = llm.engine.experts
    assert load is not None
    assert load.layers == (0, 1)
    assert load.arrived() is None
    load.ask()
    ask(llm, 4)
    earlier = load.arrived()
    assert earlier is not None
    assert int(earlier.sum()) == 0
    assert load.arrived(wait=True) is None
    assert int(load.read().sum()) > 0


def test_counts_that_overflow_on_the_device_go_on(llm: LLM) -> None:
    load = llm.engine.experts
    assert load is not None
    load._counts.fill_(2**31 - 3)
    assert int(load.read()[0, 0]) == 2**31 - 3
    ask(llm, 20, 20)
    found = load.read()
    assert found.sum(dim=1).tolist() == [8 * (2**31 - 3) + TOP_K * 48] * 2
    assert int(load._counts.min()) < 0  # some of them did overflow


def test_counts_are_read_before_they_can_lose_a_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    load = llm.engine.experts
    assert load is not None
    monkeypatch.setattr(expert_load, "OFTEN_ENOUGH", 10)
    ask(llm, 8, new=2)
    assert int(load._total.sum()) == 0, "nobody asked"
    ask(llm, 8, new=8)
    assert int(load._total.sum()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_steps_of_graphs_are_counted_and_their_padding_is_not() -> None:
    options = {**CPU, "device": "cuda", "dtype": torch.bfloat16, "max_num_seqs": 8}
    with LLM(build("tiny-moe", torch.bfloat16, "cuda"), **options) as made:
        assert int(made.expert_load().sum()) == 0
        ask(made, 4, 9, 2)
        assert made.expert_load().sum(dim=1).tolist() == [TOP_K * (4 + 9 + 2 + 3 * 4)] * 2
