"""Layers that are streamed to a GPU: the bits of the resident model, with graphs and without, within the budget."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import LLM
from outpace.errors import OffloadError
from tests.models import tiny
from tests.offload.placed import deep
from tests.offload.streamed_gpu import SAME, answers, answers_short, llama, texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


PLACES: dict[str, dict[str, Any]] = {
    "host": {"cpu_offload_gb": 1.0},
    "half": {"cpu_offload_gb": 0.02},
    "three slots": {"cpu_offload_gb": 1.0, "slots": 3},
    "one slot": {"cpu_offload_gb": 1.0, "slots": 1},
    "not locked": {},
    "disk": {"device_memory": 0.9, "cpu_offload_gb": 0.0},
}


def offload(place: str, folder: Path, in_memory: int = 6_000_000) -> dict[str, Any]:
    """Options; in_memory: values of layers that a mixed placement keeps in host memory."""
    zero = {"stage": 3, "max_live_parameters": 0, "param_persistence_threshold": 0}
    param: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder)}
    if place == "not locked":
        return {"zero": {**zero, "offload_param": {"device": "cpu", "pin_memory": False}}}
    if place == "disk":
        return {"zero": {**zero, "offload_param": {**param, "max_in_cpu": 0}}}
    if place == "mixed":
        return {"zero": {**zero, "offload_param": {**param, "max_in_cpu": in_memory}}}
    return {"offload": PLACES[place]}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("place", ["host", "half", "three slots", "one slot", "not locked", "disk", "mixed"])
def test_n8_every_placement_gives_the_bits_of_the_resident_model(place: str, graphs: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dtype": "bf16",
        "enable_cuda_graph": graphs,
        "max_num_seqs": 8,
        "num_blocks": 64,
        **SAME,
    }
    options["max_num_batched_tokens"] = 64
    capturable = place not in ("not locked", "disk", "mixed")
    with LLM(llama(), **{**options, "enable_cuda_graph": graphs and capturable}) as resident:
        wanted = answers(resident, 1000)  # steps are padded to the sizes of graphs, and other sizes give other bits
    with LLM(llama(), **options, **offload(place, tmp_path)) as llm:
        for _ in range(3):
            assert answers(llm, 1000) == wanted
        streaming = llm.engine.streaming
        assert streaming is not None
        assert streaming.capturable == capturable
        tiers = set(streaming.placement.tiers)
    assert ("disk" in tiers) == (place in ("disk", "mixed"))
    assert ("device" in tiers) == (place == "half")


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "mixtral"])
@pytest.mark.parametrize("place", ["host", "mixed"])
def test_n8_families(family: str, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dtype": "fp32",
        "max_num_seqs": 4,
        "num_blocks": 32,
        **SAME,
        "max_num_batched_tokens": 64,
    }
    model = deep(family, 9)
    vocab = model.config.vocab_size
    graphs = place == "host" and family != "mixtral"  # experts that come when they are chosen are in no graph
    with LLM(copy.deepcopy(model), **{**options, "enable_cuda_graph": graphs}) as resident:
        wanted = answers_short(resident, vocab)
    values = sum(weight.numel() for weight in model.parameters())
    with LLM(model, **options, **offload(place, tmp_path, values // 4)) as llm:
        for _ in range(2):
            assert answers_short(llm, vocab) == wanted


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantized_layers(scheme: str) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "quantization": scheme, "max_num_seqs": 8, "num_blocks": 64, **SAME}
    with LLM(llama(), **options) as resident:
        wanted = answers(resident, 1000)
    with LLM(llama(), **options, offload={"cpu_offload_gb": 1.0}) as llm:
        for _ in range(2):
            assert answers(llm, 1000) == wanted


@pytest.mark.parametrize("graphs", [True, False])
def test_forward_and_generate_of_a_module(graphs: bool) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "replace_with_kernel_inject": True, "enable_cuda_graph": graphs}
    resident = outpace.init_inference(llama(), **options)
    engine = outpace.init_inference(llama(), **options, offload={"cpu_offload_gb": 1.0})
    for number, length in enumerate((3, 30, 3, 30, 64)):
        torch.manual_seed(number)
        ids = torch.randint(3, 1000, (2, length), device="cuda")
        assert torch.equal(engine(input_ids=ids).logits, resident(input_ids=ids).logits)
        made = [each.generate(ids, max_new_tokens=12, do_sample=False) for each in (engine, resident)]
        assert torch.equal(*made)
    engine.destroy()


def test_f9_a_damaged_file_ends_in_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    llama().save_pretrained(folder)
    (tmp_path / "files").mkdir()
    zero = {"stage": 3, "max_live_parameters": 0}
    zero["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path / "files"), "max_in_cpu": 0}  # type: ignore[assignment]
    with LLM(str(folder), dtype="bf16", num_blocks=64, max_num_seqs=8, **SAME, zero=zero) as llm:
        wanted = answers(llm, 1000)
        (path,) = (tmp_path / "files").iterdir()
        kept = path.read_bytes()
        path.write_bytes(kept[: len(kept) // 2] + bytes(4096) + kept[len(kept) // 2 + 4096 :])
        with pytest.raises(OffloadError, match=r"wrong checksum|too early"):
            answers(llm, 1000)
        path.write_bytes(kept)
        assert answers(llm, 1000) == wanted


def test_a_step_that_fails_half_way_and_a_replay_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "dtype": "bf16",
        "max_num_seqs": 8,
        "num_blocks": 64,
        **SAME,
        "offload": {"cpu_offload_gb": 1.0},
    }
    with LLM(llama(), **options) as llm:
        wanted = answers(llm, 1000)
        assert llm.engine.streaming is not None
        layer: Any = llm.engine.streaming.units[5].layer
        with monkeypatch.context() as patch:
            patch.setattr(layer.qkv, "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.embed([texts(1000)[0]], use_tqdm=False)  # without a graph
        assert answers(llm, 1000) == wanted


def test_streamed_weights_are_not_on_the_device() -> None:
    model = llama(24).bfloat16()
    total = sum(weight.nbytes for weight in model.parameters())
    options: dict[str, Any] = {"dtype": "bf16", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 16}
    with LLM(model, **options, offload={"cpu_offload_gb": 1.0}) as llm:
        answers(llm, 1000)
        stores = {
            weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()
        }
        assert all(weight.is_cuda for weight in model.parameters())
        assert sum(stores.values()) < total / 6
        assert llm.engine.streaming is not None
        assert llm.engine.streaming.tier_bytes()["host"] > total * 0.8


def test_an_encoder() -> None:
    model = tiny("bert", num_hidden_layers=7)
    resident = outpace.init_inference(copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True)
    engine = outpace.init_inference(
        model, dtype=torch.float32, replace_with_kernel_inject=True, offload={"cpu_offload_gb": 1.0}
    )
    ids = torch.randint(3, 90, (2, 9), device="cuda")
    for _ in range(3):
        assert torch.equal(engine(input_ids=ids).logits, resident(input_ids=ids).logits)
