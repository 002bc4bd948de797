"""Experts that come to a GPU by need: the bits of the resident model, from host memory and from files."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import outpace
from outpace import LLM
from outpace.errors import OffloadError
from outpace.offload.streaming import Streaming
from tests.inject.mixtures import mixture
from tests.offload.streamed_gpu import SAME, answers, answers_short

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

OPTIONS: dict[str, Any] = {**SAME, "enable_cuda_graph": False, "max_num_seqs": 8, "num_blocks": 64}
OPTIONS["max_num_batched_tokens"] = 64  # times 2 choices: steps of prompts need all of 32 experts, the others do not
ZERO: dict[str, Any] = {"stage": 3, "param_persistence_threshold": 0, "prefetch_bucket_size": 1}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def qwen(layers: int = 9) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=512, moe_intermediate_size=256, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, num_experts=32, num_experts_per_tok=2, vocab_size=1000, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


LAYER = 32 * 3 * 512 * 256 + 2 * 512 * 640 + 32 * 512
"""Weights of a layer, about."""


def offload(place: str, folder: Path) -> dict[str, Any]:
    host: dict[str, Any] = {"cpu_offload_gb": 1.0}
    nvme: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0}
    zero = {**ZERO, "max_live_parameters": 4 * LAYER}
    return {
        "host": {"offload": host},
        "host, no cache": {"offload": {**host, "expert_cache": 0}},
        "host, small cache": {"offload": {**host, "expert_cache": "30MB"}},
        "host, one slot": {"offload": {**host, "slots": 1}},
        "host, three slots": {"offload": {**host, "slots": 3}},
        "not locked": {"zero": {**zero, "offload_param": {"device": "cpu", "pin_memory": False}}},
        "disk": {"zero": {**zero, "offload_param": nvme}},
        "disk, no cache": {"zero": {**zero, "offload_param": nvme, "max_live_parameters": 0}},
        "mixed": {"zero": {**zero, "offload_param": {**nvme, "max_in_cpu": 5 * LAYER}}},
    }[place]


PLACES = ("host", "host, no cache", "host, small cache", "host, one slot", "host, three slots")
OTHERS = ("not locked", "disk", "disk, no cache", "mixed")


def streaming_of(llm: LLM) -> Streaming:
    found = llm.engine.streaming
    assert found is not None
    return found


@pytest.mark.parametrize("place", [*PLACES, *OTHERS])
def test_n8_experts_by_need_give_the_bits_of_the_resident_model(place: str, tmp_path: Path) -> None:
    with LLM(qwen(), dtype="bf16", **OPTIONS) as resident:
        wanted = answers(resident, 1000)
    with LLM(qwen(), dtype="bf16", **OPTIONS, **offload(place, tmp_path)) as llm:
        for _ in range(3):
            assert answers(llm, 1000) == wanted
        streaming = streaming_of(llm)
        assert not streaming.capturable
        assert streaming.counts.misses > 0
        assert (streaming.counts.hits > 0) == (streaming.tier_bytes()["experts"] > 0) == ("no cache" not in place)
        assert streaming.counts.nbytes < streaming.counts.loads * streaming.units[0].form.nbytes


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_quantized_experts(scheme: str, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "quantization": scheme, **OPTIONS}
    with LLM(qwen(), **options) as resident:
        wanted = answers(resident, 1000)
    with LLM(qwen(), **options, **offload(place, tmp_path)) as llm:
        for _ in range(2):
            assert answers(llm, 1000) == wanted
        assert streaming_of(llm).counts.misses > 0


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "glm4"])
def test_n8_families(case: str, tmp_path: Path) -> None:
    """Strides of experts differ from those of a stack by itself, biases stay together, and some layers have none."""
    kinds = {"layer_types": ["sliding_attention", "full_attention", "full_attention"] * 3} if case == "gpt-oss" else {}
    model, again = (mixture(case, num_hidden_layers=9, **kinds) for _ in range(2))
    with LLM(model, dtype="fp32", **OPTIONS) as resident:
        wanted = answers_short(resident, 97)
    with LLM(again, dtype="fp32", **OPTIONS, offload={"cpu_offload_gb": 1.0}) as llm:
        for _ in range(2):
            assert answers_short(llm, 97) == wanted
        assert streaming_of(llm).counts.misses > 0


def test_graphs_are_left_out_or_refused() -> None:
    with LLM(qwen(), dtype="bf16", **{**OPTIONS, "enable_cuda_graph": True}, offload={"cpu_offload_gb": 1.0}) as llm:
        first = answers(llm, 1000)
        assert answers(llm, 1000) == first
    with pytest.raises(outpace.ConfigError, match="enable_cuda_graph"):
        outpace.init_inference(
            qwen(), dtype=torch.bfloat16, replace_with_kernel_inject=True, enable_cuda_graph=True,
            offload={"cpu_offload_gb": 1.0},
        )  # fmt: skip


def test_f9_altered_experts_in_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = qwen().bfloat16()
    model.save_pretrained(folder)
    stack: torch.Tensor = model.model.layers[4].mlp.experts.down_proj.detach()
    options = {**OPTIONS, **offload("disk, no cache", tmp_path / "files")}
    with LLM(str(folder), dtype="bf16", **options) as llm:
        wanted = answers(llm, 1000)
        (path,) = (tmp_path / "files").iterdir()
        content = path.read_bytes()
        places = [content.index(expert.view(torch.uint8).numpy().tobytes()) for expert in stack]
        flip(path, places)
        with pytest.raises(OffloadError, match="wrong checksum"):
            answers(llm, 1000)
        flip(path, places)
        assert answers(llm, 1000) == wanted


def flip(path: Path, places: list[int]) -> None:
    """Flip a bit at each of these places."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def test_f3_a_step_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(qwen(), dtype="bf16", **OPTIONS, offload={"cpu_offload_gb": 1.0, "expert_cache": "30MB"}) as llm:
        wanted = answers(llm, 1000)
        for where in ("_copy_in", "_copy_out"):
            with monkeypatch.context() as patch:
                patch.setattr(f"outpace.offload.ways.{where}", fail)
                with pytest.raises(ZeroDivisionError):
                    answers(llm, 1000)
            assert answers(llm, 1000) == wanted
