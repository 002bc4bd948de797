"""Every file that cannot be run is refused with one line that names what is wrong."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace.errors import ModelError
from outpace.loading.build import load
from outpace.loading.gguf import read_gguf
from tests.loading.tiny import TOKENS, VOCAB, tiny_model, write_gguf


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(path, dtype=torch.float32, device=torch.device("cpu"))
    message = str(caught.value)
    assert message.startswith("model: ")
    assert "\n" not in message
    return message


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "not a GGUF file"),
    "another format": (lambda data: b"PK\x03\x04" + data, "not a GGUF file"),
    "only the magic": (lambda data: data[:4], "damaged"),
    "an unknown version": (lambda data: data[:4] + struct.pack("<I", 99) + data[8:], "version 99"),
    "cut in the header": (lambda data: data[:20], "ends early"),
    "cut in the metadata": (lambda data: data[:1000], "ends early"),
    "cut in the weights": (lambda data: data[:-1000], "ends early"),
    "a count of tensors beyond reason": (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "damaged"),
    "a count of keys beyond reason": (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "damaged"),
    "a string beyond reason": (lambda data: data[:24] + struct.pack("<Q", 1 << 63) + data[32:], "ends early"),
    "a key of no known type": (
        lambda data: data.replace(b"llama.block_count\x04", b"llama.block_count\x63", 1),
        "damaged",
    ),
    "text that is not UTF-8": (lambda data: data.replace(b"llama.block_count", b"llama.block_coun\xff", 1), "damaged"),
}


@pytest.mark.parametrize("case", BYTES)
def test_damaged_bytes(tmp_path: Path, case: str) -> None:
    damage, expected = BYTES[case]
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    path.write_bytes(damage(path.read_bytes()))
    assert expected in refused(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 37), *range(400, len(whole) - 1, len(whole) // 12)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(cut)


def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    path.write_bytes(data[:at] + struct.pack("<Q", 1 << 50) + data[at + 8 :])
    assert "ends early" in refused(path)


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"general.architecture": "mamba"},
        "'mamba' is not supported in a GGUF file; supported: llama, q",
    ),
    "more blocks than tensors": ({"llama.block_count": 10**7}, "num_hidden_layers: 10000000, but the weights have"),
    "a missing size": ({"llama.block_count": None}, "llama.block_count: missing"),
    "a size of zero": ({"llama.attention.head_count": 0}, "llama.attention.head_count: must be one positive integer"),
    "a size per layer": ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count: must be one positive"),
    "a size that is text": ({"llama.embedding_length": "64"}, "llama.embedding_length: must be one positive integer"),
    "a size the tensors contradict": ({"llama.feed_forward_length": 128}, "ffn_gate.weight: has shape (96, 64)"),
    "heads that do not divide": ({"llama.attention.head_count": 7}, "heads"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: missing"),
    "a key nobody knows": ({"llama.logit_scale": 0.5}, "llama.logit_scale: 0.5 is not supported"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count: 8 is not supported"),
    "a sliding window": ({"llama.attention.sliding_window": 16}, "llama.attention.sliding_window: 16 is not supported"),
    "rope on part of the head": ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: 8 differs"),
    "values of another size": ({"llama.attention.value_length": 8}, "llama.attention.value_length: 8 differs"),
    "an unknown scaling": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: 'longrope'"),
    "yarn without a factor": ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor: missing"),
    "an odd attention factor": ({"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor: 0.5"),
    "a part of a model": ({"split.count": 3}, "split.count: the model is split over 3 files"),
    "an adapter": ({"general.type": "adapter"}, "general.type: this file holds 'adapter'"),
    "an unknown tokenizer": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model: 'rwkv'"),
    "an unknown pre-tokenizer": (
        {"tokenizer.ggml.pre": "klingon"},
        "tokenizer.ggml.pre: 'klingon' is not supported; sup",
    ),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre: None"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: missing"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": [*TOKENS, *map(str, range(1000, 1999))]}, "tokenizer.ggml.t"),
    "a token twice": ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "!"]}, "the same token occurs twice"),
    "too few token types": ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type: has 2 entries"),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: missing"),
    "a merge of one": ({"tokenizer.ggml.merges": ["he"]}, "tokenizer.ggml.merges: 'he' is not two tokens"),
    "a merge out of nothing": ({"tokenizer.ggml.merges": ["x y"]}, "tokenizer.ggml.merges"),
    "an end outside": ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id: 9999 is outside"),
    "a begin that is not named": (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
        "tokenizer.ggml.add_bos_token: is set",
    ),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_cannot_be_run(tmp_path: Path, case: str) -> None:
    metadata, expected = METADATA[case]
    assert expected in refused(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata=metadata))


ZEROS = np.zeros((64, 64), dtype=np.float32)
TENSORS: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "one too many": (
        {"blk.0.attn_sinks.weight": ZEROS},
        "tensors that a llama model does not have: blk.0.attn_sinks",
    ),
    "a layer too many": ({"blk.2.attn_q.weight": ZEROS}, "a llama model does not have: blk.2.attn_q.weight"),
    "one too few": ({"blk.1.ffn_up.weight": None}, "file lacks: model.layers.1.mlp.up_proj.weight"),
    "no embedding": ({"token_embd.weight": None}, "token_embd.weight: missing"),
    "a wrong shape": ({"blk.0.attn_output.weight": ZEROS[:32]}, "blk.0.attn_output.weight: has shape (32, 64)"),
    "whole numbers": ({"blk.0.attn_output.weight": ZEROS.astype(np.int32)}, "cannot dequantize type I32"),
    "not a number": (
        {"output_norm.weight": np.full(64, np.nan, np.float32)},
        "output_norm.weight: holds values that are",
    ),
    "other divisors": ({"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}, "not Llama 3's rope factors"),
    "divisors of another size": ({"rope_freqs.weight": np.ones(4, np.float32)}, "not Llama 3's rope factors"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, case: str) -> None:
    tensors, expected = TENSORS[case]
    assert expected in refused(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), tensors=tensors))


def test_q_norms_in_a_llama_are_left_over(tmp_path: Path) -> None:
    norm: dict[str, np.ndarray | None] = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    assert "attn_q_norm" in refused(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), tensors=norm))


def test_values_too_large_for_float16_are_refused_not_made_infinite(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", tiny_model("llama"), tensors={"output_norm.weight": np.full(64, 1e6, np.float32)}
    )
    with pytest.raises(ModelError, match=r"not finite in torch\.float16"):
        load(path, dtype=torch.float16, device=torch.device("cpu"))


def test_the_other_byte_order(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), endianess=gguf.GGUFEndian.BIG)
    assert "byte order" in refused(path)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for path, expected in ((tmp_path / "folder.gguf", "is a folder"), (tmp_path / "none.gguf", "does not exist")):
        with pytest.raises(ModelError, match=expected):
            read_gguf(path)


def test_rows_beyond_the_tokens_are_fine() -> None:
    assert len(TOKENS) < VOCAB  # so every file above has such rows
