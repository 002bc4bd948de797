"""Loading folders, files and names; what cannot be loaded is refused in one line."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DistilBertConfig, DistilBertForMaskedLM

import outpace
from outpace.config import LLMConfig
from outpace.errors import ModelError, NotSupported
from outpace.load_paged import load_paged
from outpace.loading import dtypes
from outpace.loading.build import load
from outpace.loading.dtypes import choose_dtype
from outpace.loading.gguf_tokenizer import build_tokenizer
from outpace.quant.fast import cpu_flags
from outpace.verify import verify
from tests.loading.tiny import VOCAB, tiny_model, token_metadata, write_gguf
from tests.models import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IDS = torch.arange(3, 23)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder."""
    path = tmp_path / "tiny-llama"
    tiny_model("llama").save_pretrained(path)
    build_tokenizer(token_metadata(), 128, VOCAB).save_pretrained(path)
    return path


def refused(source: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(source, device=CPU)
    message = str(caught.value)
    assert message.startswith("model: ")
    assert "\n" not in message
    return message


def test_a_folder(folder: Path) -> None:
    loaded = load(folder, device=CPU)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(IDS).logits, tiny_model("llama")(IDS).logits)
    assert not loaded.model.training
    assert (loaded.name, loaded.path, loaded.dtype) == ("tiny-llama", folder, torch.float32)
    assert loaded.dtype_reason == "the checkpoint's own"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("hello")["input_ids"] == build_tokenizer(token_metadata(), 128, VOCAB)("hello")["input_ids"]


def test_a_folder_named_by_a_string_relative_to_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load(".", device=CPU).name == "tiny-llama"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_that_was_asked_for(folder: Path, dtype: torch.dtype) -> None:
    loaded = load(folder, dtype=dtype, device=CPU)
    assert {value.dtype for value in loaded.model.parameters()} == {dtype}
    assert (loaded.dtype, loaded.dtype_reason) == (dtype, "asked for")


@pytest.mark.parametrize("family", ["t5", "whisper"])
@pytest.mark.parametrize("run", [outpace.LLM, verify])
def test_item_26_an_encoder_with_a_decoder_is_told_what_runs_it(tmp_path: Path, family: str, run: Any) -> None:
    model = tiny(family)
    kind = type(model).__name__
    model.save_pretrained(tmp_path / family)
    says = f"model: {family} is an encoder-decoder model, .* load it with transformers .{kind}.from_pretrained. and"
    with pytest.raises(NotSupported, match=says):
        run(tmp_path / family, device="cpu")
    with pytest.raises(
        NotSupported,
        match=f"model: {kind} is an encoder-decoder model, .* only decoders; call it with outpace.init_inf",
    ):
        run(model, device="cpu")


def test_item_26_a_model_that_makes_no_text_is_told_what_runs_it(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {"vocab_size": 32, "dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
    DistilBertForMaskedLM(DistilBertConfig(**tokens)).save_pretrained(tmp_path)
    says = "is a DistilBertForMaskedLM, which does not generate text from text; load it with .* outpace.init_inference"
    with pytest.raises(NotSupported, match=says):
        load(tmp_path, device=CPU)


def test_only_bin_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with caplog.at_level(logging.INFO, "outpace"):
        loaded = load(folder, device=CPU)
    assert "weights: pytorch_model.bin (the folder has no safetensors" in caplog.text
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(IDS).logits, tiny_model("llama")(IDS).logits)


def test_bin_weights_never_run_code(folder: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"a": Harm()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "code in them never runs" in refused(folder)
    assert not (tmp_path / "harm").exists()


def test_choices_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with caplog.at_level(logging.INFO, "outpace"):
        assert load(folder, device=CPU).tokenizer is None
    assert "dtype: float32 (the checkpoint's own)" in caplog.text
    assert "tokenizer: None (" in caplog.text


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.adapter.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def index(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)


def only_gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "x.gguf").touch()


def of_training(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "global_step5").mkdir()
    (folder / "latest").write_text("global_step5")
    (folder / "global_step5" / "mp_rank_00_model_states.pt").touch()


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json; name the folder"),
    "a GGUF file inside": (only_gguf, "has no config.json; name the file itself: "),
    "a training run": (of_training, "a training run saved it: copy config.json and the tokenizer of the model into it"),
    "a config that is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot use"),
    "a model nobody knows": (lambda folder: edit_config(folder, model_type="klingon"), "cannot use"),
    "a config with a wrong value": (lambda folder: edit_config(folder, num_attention_heads="many"), "cannot use"),
    "a model with its own code": (
        lambda folder: edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "Outpace never runs code from a model",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "truncated weights": (lambda folder: cut(folder / "model.safetensors", 50_000), "is damaged or incomplete"),
    "empty weights": (lambda folder: cut(folder / "model.safetensors", 0), "is damaged or incomplete"),
    "a missing shard": (
        lambda folder: index(folder, '{"weight_map": {"a": "s-1.safetensors"}}'),
        "s-1.safetensors is missing",
    ),
    "an index that is none": (lambda folder: index(folder, "[]"), "is not a weight index"),
    "a missing parameter": (drop_tensor, "missing: 1 (model.layers.1.mlp.up_proj.weight)"),
    "a parameter too many": (add_tensor, "extra: 1 (model.layers.0.adapter.weight)"),
    "a size the weights contradict": (
        lambda folder: edit_config(folder, intermediate_size=128),
        "model.layers.0.mlp.down_proj.weight: [64, 96] instead of [64, 128]",
    ),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot use the tokenizer"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_cannot_be_loaded(folder: Path, case: str) -> None:
    damage, expected = FOLDERS[case]
    damage(folder)
    assert expected in refused(folder)


def test_names_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    assert f"did you mean {folder}?" in refused(tmp_path / "tiny-lama")
    assert f"did you mean {folder}?" in refused(str(tmp_path / "tiny_llama"))
    assert "does not exist either" in refused("/no/such/place")
    assert "check the name" in refused("./zzz")
    assert "no such file or folder 'model.gguf'" in refused("model.gguf")
    assert "the name is empty" in refused("")
    assert "cannot be a file or folder" in refused("/" + "x" * 5000)
    assert "cannot be a file or folder" in refused("~nobody-of-this-name/model")
    assert "neither a folder nor a file of weights" in refused(folder / "config.json")


def test_a_name_on_hugging_face(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot(name: str, **_: Any) -> str:
        asked.append(name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    loaded = load("some/model", device=CPU)
    assert (loaded.name, loaded.path, asked) == ("some/model", folder, ["some/model"])


def test_a_name_on_hugging_face_with_bin_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    def snapshot(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        if "pytorch_model*.bin" in allow_patterns:
            shutil.copy(tmp_path / "pytorch_model.bin", folder)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load("model", device=CPU).name == "model"


def test_offline_a_name_that_is_not_cached_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "cannot be fetched from Hugging Face" in refused("nobody/nothing")


def test_a_gguf_file_names_itself(tmp_path: Path) -> None:
    loaded = load(write_gguf(tmp_path / "Tiny-Q4.GGUF", tiny_model("llama")), device=CPU)
    assert (loaded.name, loaded.dtype) == ("Tiny-Q4", torch.float32)
    assert loaded.dtype_reason == "a quantized file has no dtype of its own; cpu runs float32"


@pytest.mark.parametrize(
    ("own", "device", "flags", "expected"),
    [
        (torch.float16, CPU, "avx2 f16c", torch.float32),
        (torch.float16, CPU, "avx512_bf16", torch.float32),
        (torch.float16, CPU, "avx512_fp16", torch.float16),
        (torch.float16, CPU, "amx_fp16", torch.float16),
        (torch.bfloat16, CPU, "avx512_fp16", torch.float32),
        (torch.bfloat16, CPU, "avx512_bf16", torch.bfloat16),
        (torch.bfloat16, CPU, "amx_bf16", torch.bfloat16),
        (torch.float32, CPU, "amx_bf16", torch.float32),
        (torch.float64, CPU, "", torch.float64),
        (None, CPU, "amx_bf16", torch.float32),
        (torch.float16, GPU, "", torch.float16),
        (torch.bfloat16, GPU, "", torch.bfloat16),
        (torch.float32, GPU, "", torch.float32),
        (None, GPU, "", torch.bfloat16),
    ],
)
def test_the_dtype_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, own: torch.dtype | None, device: torch.device, flags: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    dtype, reason = choose_dtype(own, device)
    assert dtype == expected
    assert reason


def test_a_torch_held_back_from_avx512_has_no_native_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose_dtype(torch.bfloat16, CPU)[0] == torch.float32


def test_cpu_flags(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16\n\nprocessor\t: 1\n")
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx512_bf16"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_a_checkpoint_that_does_not_say_its_dtype(folder: Path) -> None:
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype=None)
    assert load(folder, device=CPU).dtype == choose_dtype(torch.bfloat16, CPU)[0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"is_causal": False}, "sees later tokens"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "keep max_out_tokens at 32"),
    ],
)
def test_what_pages_cannot_run_is_refused_before_weights_are_read(
    changes: dict[str, Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("llama", **changes, original_max_position_embeddings=32).save_pretrained(tmp_path)
    monkeypatch.setattr("outpace.prepare.fill", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(NotSupported, match=match):
        load_paged(tmp_path, LLMConfig(dtype="fp32", device="cpu"), tokenizer=False)


@pytest.mark.parametrize("dtype", [3, "int8"])
def test_a_config_with_a_dtype_that_is_none(dtype: Any, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}))
    with pytest.raises(ModelError, match=r"config.json: dtype"):
        load(tmp_path)


WRONG_CONFIGS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "more layers than tensors": (
        "llama",
        {"num_hidden_layers": 2000},
        "num_hidden_layers: 2000, but the weights have ",
    ),
    "millions of layers": (
        "qwen3",
        {"num_hidden_layers": 10**12},
        "num_hidden_layers: 1000000000000 is more than 10000",
    ),
    "millions of layers by another name": ("gpt2", {"n_layer": 10**7}, "n_layer: 10000000 is more than 10000"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads: 0 cannot be divided by"),
    "no heads of keys": ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: 0 cannot be divided by"),
    "a width": ("llama", {"hidden_size": 10**9}, "hidden_size: 1000000000, but the largest dimension"),
    "a vocabulary": ("gpt2", {"vocab_size": 10**12}, "vocab_size: 1000000000000, but the largest dimension"),
    "positions": ("opt", {"max_position_embeddings": 10**12}, "max_position_embeddings: 1000000000000 is the largest"),
    "a width in words": ("llama", {"hidden_size": "x"}, "'hidden_size' expected int, got str"),
    "a function": ("llama", {"hidden_act": "nope"}, "hidden_act: 'nope' is not known"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_numbers_of_a_config_that_cannot_be_true(case: str, tmp_path: Path) -> None:
    family, changes, says = WRONG_CONFIGS[case]
    tiny(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    message = refused(tmp_path)
    assert str(path) in message
    assert says in message


def test_a_table_of_positions_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 10**12}))
    config = LLMConfig(dtype="fp32", device="cpu", max_out_tokens=64)
    assert load_paged(tmp_path, config, tokenizer=False).max_model_len == 64
    monkeypatch.setattr("outpace.prepare.fill", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=r"^model: config\.json: max_position_embeddings: .* 1000000000000 positions"):
        load_paged(tmp_path, LLMConfig(dtype="fp32", device="cpu"), tokenizer=False)
