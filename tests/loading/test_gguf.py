"""GGUF files: the model that comes out is the model that went in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn import Module
from transformers import PreTrainedModel

from outpace.loading.build import Loaded, load
from outpace.loading.gguf import read_gguf
from outpace.loading.gguf_config import hf_name
from tests.loading.tiny import requantized, tiny_model, write_gguf

CPU = torch.device("cpu")
IDS = torch.arange(3, 43).reshape(2, 20)
FAMILIES = ["llama", "qwen2", "qwen3"]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def logits(model: Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


def assert_same(path: Path, model: PreTrainedModel, tolerance: float = 1e-5) -> Loaded:
    loaded = load(path, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=tolerance, atol=tolerance)
    return loaded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_file_gives_the_same_logits(tmp_path: Path, family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    loaded = assert_same(write_gguf(tmp_path / "m.gguf", model), model)
    assert isinstance(loaded.model, PreTrainedModel)
    shared = loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    assert shared == tied
    assert not loaded.model.training
    assert not any(value.requires_grad for value in loaded.model.parameters())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_file_gives_the_logits_of_the_dequantized_weights(tmp_path: Path, family: str, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(family), kind)
    assert_same(path, requantized(tiny_model(family), kind))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_variants_of_a_family(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    loaded = assert_same(write_gguf(tmp_path / "m.gguf", model), model)
    assert isinstance(loaded.model, PreTrainedModel)
    assert loaded.model.config.rms_norm_eps == model.config.rms_norm_eps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 1.0, "finetuned": True},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
        ),
    ],
)
def test_scaled_rope(tmp_path: Path, family: str, rope: dict[str, Any], keys: dict[str, Any]) -> None:
    model = tiny_model(family, rope_parameters={"rope_theta": 10000.0, **rope})
    metadata = {f"{family}.rope.scaling.{key}": value for key, value in keys.items()}
    assert_same(write_gguf(tmp_path / "m.gguf", model, metadata=metadata), model)


def test_the_old_key_of_linear_scaling(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    assert_same(write_gguf(tmp_path / "m.gguf", model, metadata={"llama.rope.scale_linear": 2.0}), model)


@pytest.mark.parametrize("factor", [8.0, 32.0])  # Llama 3.1, Llama 3.2
def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path, factor: float) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **LLAMA3}
    scaled = tiny_model("llama", rope_parameters=dict(rope))
    plain = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    divisors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    loaded = assert_same(write_gguf(tmp_path / "m.gguf", scaled, tensors={"rope_freqs.weight": divisors}), scaled)
    assert isinstance(loaded.model, PreTrainedModel)
    assert loaded.model.config.rope_parameters == rope


def test_divisors_of_one_are_plain_rope(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ones = np.ones(8, dtype=np.float32)
    config = read_gguf(write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": ones})).config
    assert config.rope_parameters["rope_type"] == "default"


def inverse_frequencies(model: PreTrainedModel) -> np.ndarray:
    found: np.ndarray = model.get_buffer("model.rotary_emb.inv_freq").numpy()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_buffers_are_real_and_rope_stays_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load(write_gguf(tmp_path / "m.gguf", tiny_model("llama")), dtype=dtype, device=CPU)
    assert {value.dtype for value in loaded.model.parameters()} == {dtype}
    buffers = dict(loaded.model.named_buffers())
    assert buffers
    assert {(value.dtype, value.device.type) for value in buffers.values()} == {(torch.float32, "cpu")}


def test_tensors_come_one_at_a_time_and_own_their_memory(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "m.gguf", tiny_model("qwen3")))
    stream = file.tensors(torch.float32)
    name, tensor = next(stream)
    tensor.zero_()  # a view of the read-only file would crash here
    assert name == "model.embed_tokens.weight"
    assert len(list(stream)) == len(file.entries) - 1


def test_end_of_turn_ends_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata={"tokenizer.ggml.eot_token_id": 0})
    assert read_gguf(path).config.eos_token_id == [2, 0]


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata={"tokenizer.ggml.model": None})
    assert load(path, device=CPU).tokenizer is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.17.attn_q.bias", "model.layers.17.self_attn.q_proj.bias"),
        ("blk.0.ffn_gate_exps.weight", None),
        ("blk.x.attn_q.weight", None),
        ("v.blk.0.attn_q.weight", None),
        ("weight", None),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert hf_name(name) == expected
