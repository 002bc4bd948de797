"""Experts of streamed layers, fetched by need: the bits of the resident model (N-8), and few bytes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outpace
from outpace import ConfigError
from outpace.errors import OffloadError
from outpace.offload.experts import Kept, shares
from outpace.offload.units import Form
from tests.inject.mixtures import mixture
from tests.models import padded, prompts
from tests.offload.placed import LAYERS, offload_at
from tests.offload.streamed import (
    CASES,
    EVERYTHING,
    answers,
    llm_of,
    model_of,
    offload_of,
    run,
    some,
    streaming_of,
)


@pytest.mark.parametrize("how", ["host, none", "host, some", "host, all", "disk, none", "disk, some", "mixed, some"])
@pytest.mark.parametrize("case", CASES)
def test_n8_experts_by_need_give_the_bits_of_the_resident_model(case: str, how: str, tmp_path: Path) -> None:
    model = model_of(case)
    with llm_of(model) as resident:
        wanted = answers(resident)
    with llm_of(model, offload=offload_of(how, model, tmp_path)) as llm:
        for _ in range(2):
            assert answers(llm) == wanted
        streaming = streaming_of(llm)
        assert streaming.counts.misses > 0
        assert (streaming.counts.hits > 0) == ("none" not in how)
        assert (streaming.tier_bytes()["experts"] > 0) == ("none" not in how)
        assert not streaming.capturable


@pytest.mark.parametrize("scheme", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_quantized_experts(scheme: str, place: str, tmp_path: Path) -> None:
    model = model_of("qwen3", hidden_size=64, num_attention_heads=4, moe_intermediate_size=32)
    live = 4 * sum(weight.numel() for weight in model.model.layers[0].parameters())
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    zero = {"stage": 3, "offload_param": nvme, "max_live_parameters": live, "prefetch_bucket_size": 1000}
    zero["param_persistence_threshold"] = 0
    with llm_of(model, quantization=scheme) as resident:
        wanted = answers(resident)
    given: dict[str, Any] = {"offload": EVERYTHING} if place == "host" else {"zero": zero}
    with llm_of(model, quantization=scheme, **given) as llm:
        for _ in range(2):
            assert answers(llm) == wanted
        assert streaming_of(llm).counts.hits > 0


@pytest.mark.parametrize("inject", [True, False])
def test_forward_and_generate_of_a_module(inject: bool, tmp_path: Path) -> None:
    model, inputs = model_of("mixtral"), padded(prompts(4, 9), "left")
    options: dict[str, Any] = {"replace_with_kernel_inject": inject, "device": "cpu"}
    resident = outpace.init_inference(copy.deepcopy(model), **options)
    engine = outpace.init_inference(copy.deepcopy(model), offload=offload_at("host", model, tmp_path), **options)
    for _ in range(2):
        assert torch.equal(engine(**inputs).logits, resident(**inputs).logits)
        made = [each.generate(**inputs, max_new_tokens=6, do_sample=False) for each in (engine, resident)]
        assert torch.equal(*made)
    assert engine.streaming is not None
    assert (engine.streaming.counts.misses > 0) == inject, "the model's own experts travel with their layers"
    engine.destroy()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_one_request_fetches_a_few_experts_of_many(place: str, tmp_path: Path) -> None:
    model = model_of("qwen3", num_experts=32)
    with llm_of(model, offload={**offload_at(place, model, tmp_path), "expert_cache": 0}) as llm:
        streaming = streaming_of(llm)
        whole, before = streaming.units[0].form.nbytes, copy.copy(streaming.counts)
        run(llm, 3, 9)
        loads, nbytes = streaming.counts.loads - before.loads, streaming.counts.nbytes - before.nbytes
        steps = loads // len(streaming.units)
        assert steps >= 9
        assert nbytes < loads * whole / 3
        assert 0 < streaming.counts.misses - before.misses <= len(streaming.units) * (6 + 2 * steps)


def test_a_step_of_many_tokens_fetches_whole_layers_ahead() -> None:
    model = model_of("qwen3")
    with llm_of(model, offload=EVERYTHING, enable_prefix_caching=False) as llm:
        streaming = streaming_of(llm)
        run(llm, 2, 3)
        before = copy.copy(streaming.counts)
        run(llm, 30, 1)
        looked = streaming.counts.hits + streaming.counts.misses - before.hits - before.misses
        assert looked <= 2 * 16, "only of the layers that were there when the step began"
        form, fetched = streaming.units[0].form, streaming.counts.nbytes - before.nbytes
        assert fetched >= (LAYERS - 2) * form.nbytes
        before = copy.copy(streaming.counts)
        run(llm, 30, 1, seed=1)
        loads, fetched = streaming.counts.loads - before.loads, streaming.counts.nbytes - before.nbytes
        assert fetched == loads * form.dense, "there was room to keep all experts"


def test_what_was_used_last_is_not_fetched_again() -> None:
    model = model_of("qwen3")
    with llm_of(model, offload=EVERYTHING, enable_prefix_caching=False) as llm:
        streaming = streaming_of(llm)
        run(llm, 4, 6)
        before = copy.copy(streaming.counts)
        run(llm, 4, 6)
        assert streaming.counts.misses == before.misses
        assert streaming.counts.hits > before.hits
        run(llm, 4, 6, seed=5)
        assert streaming.counts.misses > before.misses


def flip(path: Path, places: list[int]) -> None:
    """Flip a bit at each of these places. The file is read meanwhile, ahead of the next step."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))


def test_f9_altered_experts_in_a_file(tmp_path: Path) -> None:
    model, folder, files = model_of("mixtral"), tmp_path / "model", tmp_path / "files"
    model.save_pretrained(folder)
    experts = model.model.layers[-1].mlp.experts.down_proj.detach()
    options = {"offload": {**offload_at("disk", model, files), "expert_cache": 0}, "enable_prefix_caching": False}
    with llm_of(str(folder), **options) as llm:
        wanted = answers(llm)
        (path,) = files.iterdir()
        places = [path.read_bytes().index(expert.numpy().tobytes()) for expert in experts]
        flip(path, places)
        for _ in range(2):
            with pytest.raises(OffloadError, match="wrong checksum"):
                answers(llm)
        flip(path, places)
        assert answers(llm) == wanted
    with llm_of(str(folder), **options) as llm:
        assert answers(llm) == wanted, "the file serves another start"


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["_copy_in", "_copy_out"])
@pytest.mark.parametrize("place", ["host", "mixed"])
def test_f3_a_step_that_fails_half_way(where: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = model_of("mixtral")
    with llm_of(model, offload=some(model, place, tmp_path, 2), enable_prefix_caching=False) as llm:
        wanted = answers(llm)
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(f"outpace.offload.ways.{where}", fail)
                with pytest.raises(ZeroDivisionError):
                    answers(llm)
            layer: Any = streaming_of(llm).units[4].layer
            with monkeypatch.context() as patch:
                patch.setattr(layer.mixture.router, "forward", fail)
                with pytest.raises(ZeroDivisionError):
                    answers(llm)
            assert answers(llm) == wanted


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model = model_of("mixtral")
    given = offload_at("host", model, tmp_path)
    with pytest.raises(ConfigError, match=r"offload\.expert_cache: .* requested, but 2 slots .* leave"):
        llm_of(model, offload={**given, "expert_cache": given["device_memory"]})
    with pytest.raises(ConfigError, match=r"offload\.expert_cache: no layer of this model has fused experts"):
        llm_of(mixture("qwen3", mlp_only_layers=[0, 1, 2]), offload={"cpu_offload_gb": 1.0, "expert_cache": 0.1})
    with llm_of(model, offload={"auto": True, "expert_cache": 0.1}) as llm:
        assert llm.engine.streaming is None, "everything fits"


def test_a_quarter_of_the_device_unless_told_otherwise(tmp_path: Path) -> None:
    model = model_of("mixtral")
    for stay, more in (("host", False), ("some stay", True)):
        with llm_of(model, offload=offload_at(stay, model, tmp_path)) as llm:
            held = streaming_of(llm).tier_bytes()
            assert (held["experts"] > held["slots"] // 4) == more
            assert held["experts"] < held["slots"]


PIECES = [torch.zeros(1, dtype=torch.uint8) for _ in range(3)]


def test_pieces_of_experts_that_are_not_in_use_are_taken_longest_unused_first() -> None:
    kept = Kept(PIECES)
    kept.put(kept.take([1, 2, 3], {1, 2, 3}))
    assert list(kept.find([1, 7])) == [1]
    taken = kept.take([7], {1, 7})
    kept.put(taken)
    assert list(kept.find([1, 2, 3, 7])) == [1, 3, 7], "2 was used longest ago"
    assert kept.take([8, 9], {1, 3, 7}) == {}, "all are in use"
    taken = kept.take([8, 9], {1, 8, 9})
    assert len(taken) == 2
    kept.forget(taken)
    assert not kept.find(range(10))
    assert len(kept.take([4, 5, 6, 7], set())) == 3


FORMS = st.lists(st.builds(Form, st.just(10), st.integers(1, 9), st.integers(1, 20)), max_size=6)


@given(FORMS, st.integers(0, 2000))
def test_shares_of_device_memory(forms: list[Form], nbytes: int) -> None:
    counts = shares(forms, nbytes)
    used = sum(count * form.piece for count, form in zip(counts, forms, strict=True))
    assert used <= nbytes
    for count, form in zip(counts, forms, strict=True):
        assert 0 <= count <= form.experts
        assert count == form.experts or used + form.piece > nbytes, "none is left that fits"
