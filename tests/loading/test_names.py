"""`match` gives every tensor of a model the bytes that `from_pretrained` would load, and refuses what does not fit."""

import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter

from outpace.loading.names import match
from outpace.loading.open import open_weights
from outpace.loading.read_source import read
from outpace.loading.weights import Source
from tests.loading import checkpoints
from tests.loading.skeletons import ALL, make, memory, skeleton


def file(folder: Path) -> Path:
    """The one file of a folder."""
    return folder / "model.safetensors"


def weight_groups(model: nn.Module) -> list[list[str]]:
    """Names of one Parameter, together."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, value in model.state_dict(keep_vars=True).items():
        groups[id(value)].append(name)
    return sorted(sorted(names) for names in groups.values())


def check(folder: Path, expected: PreTrainedModel, empty: nn.Module | None = None) -> dict[str, Source]:
    """The folder's tensors are those that Hugging Face loaded, bit for bit, and tied alike."""
    empty = skeleton(expected) if empty is None else empty
    found = match(empty, open_weights(folder))
    tensors = expected.state_dict()
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        value = read(found[name])
        assert value.dtype == tensor.dtype
        assert torch.equal(value, tensor), name
        assert torch.equal(value, checkpoints.read(found[name])), name  # each element once
    assert weight_groups(empty) == weight_groups(expected)
    return found


@pytest.mark.parametrize("family", ALL)
def test_what_from_pretrained_loads(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path / "one")
    expected = type(model).from_pretrained(tmp_path / "one")
    found = check(tmp_path / "one", expected)
    assert all(not callable(piece.place) for source in found.values() for piece in source.pieces)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    check(tmp_path / "many", expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_go_one_by_one_into_the_stacked_parameter(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    weights = open_weights(tmp_path)
    assert len(weights.sources) > len(model.state_dict())  # stored one by one
    found = match(skeleton(model), weights)
    (experts,) = {source.shape[0] for name, source in found.items() if name.endswith("experts.gate_up_proj")}
    for name, source in found.items():
        if "experts." in name and "shared" not in name:
            assert len(source.pieces) == experts * (2 if "gate_up" in name else 1)
            assert {piece.take for piece in source.pieces} == {()}


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "qwen3_moe"])
def test_the_base_models_names_in_a_model_with_a_head(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.base_model.save_pretrained(tmp_path)
    prefix = f"{model.base_model_prefix}."
    assert not any(name.startswith(prefix) for name in open_weights(tmp_path).sources)
    check(tmp_path, type(model).from_pretrained(tmp_path))


def test_a_model_with_a_head_in_its_base_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "outpace"):
        check(tmp_path, type(model.base_model).from_pretrained(tmp_path))
    assert "weights of parts that this model does not have: lm_head.weight (1)" in caplog.text


@pytest.mark.parametrize("kept", ["shared.weight", "lm_head.weight", "encoder.embed_tokens.weight"])
def test_any_name_of_a_tied_weight_is_enough(kept: str, tmp_path: Path) -> None:
    model = make("t5")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({kept if name == "shared.weight" else name: value for name, value in tensors.items()}, file(tmp_path))
    found = check(tmp_path, type(model).from_pretrained(tmp_path))
    assert found["shared.weight"] is found["lm_head.weight"] is found["decoder.embed_tokens.weight"]


@pytest.mark.parametrize("family", ["gpt2", "bert", "gemma3"])
@pytest.mark.parametrize("differ", [False, True])
def test_both_names_of_a_tied_weight(
    family: str, differ: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    target, source = next(iter(model.all_tied_weights_keys.items()))
    tensors = load_file(file(tmp_path))
    tensors[target] = tensors[source].clone()
    if differ:
        tensors[target][-1, -1] += 1
    save_file(tensors, file(tmp_path), metadata={"format": "pt"})
    expected = type(model).from_pretrained(tmp_path)
    empty = skeleton(model)
    with caplog.at_level(logging.WARNING, "outpace"):
        found = check(tmp_path, expected, empty)
    assert (found[source] == found[target]) is not differ
    assert empty.all_tied_weights_keys == expected.all_tied_weights_keys
    assert (f"{target} is not tied to {source}" in caplog.text) is differ


def test_a_skeleton_whose_ties_were_lost_gets_them_back(tmp_path: Path) -> None:
    model = make("gpt2")
    model.save_pretrained(tmp_path)
    empty: Any = skeleton(model)
    empty.lm_head.weight = nn.Parameter(torch.empty_like(empty.lm_head.weight))
    check(tmp_path, model, empty)
    assert empty.lm_head.weight is empty.transformer.wte.weight


class Plain(nn.Module):
    """A module of nobody's library, with a shared weight and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_plain_module_by_its_names(prefix: str) -> None:
    stored = Plain().state_dict()
    with torch.device("meta"):
        empty = Plain()
    found = match(
        empty, memory({prefix + name: value for name, value in stored.items()} | {f"{prefix}scratch": torch.ones(2)})
    )
    assert found.keys() == stored.keys()
    assert all(torch.equal(read(found[name]), value) for name, value in stored.items())
    assert empty.first.weight is empty.second.weight


def test_a_module_called_module_keeps_its_name() -> None:
    with torch.device("meta"):
        empty = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert match(empty, memory(nn.ModuleDict({"module": nn.Linear(2, 2)}).state_dict())).keys() == {
        "module.weight",
        "module.bias",
    }


def test_one_name_of_a_shared_weight_of_a_plain_module() -> None:
    stored = Plain().state_dict()
    del stored["first.weight"]
    found = match(Plain(), memory(stored))
    assert found["first.weight"] is found["second.weight"]


def test_old_names_of_norms() -> None:
    model = make("bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in model.state_dict().items()
    }
    found = match(skeleton(model), memory(old))
    assert all(torch.equal(read(found[name]), value) for name, value in model.state_dict().items())


def test_a_buffer_that_need_not_be_stored_keeps_its_value() -> None:
    sizes: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    heads: dict[str, Any] = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    model = PegasusForConditionalGeneration(PegasusConfig(**sizes, **heads, encoder_ffn_dim=8, decoder_ffn_dim=8))
    stored = {name: value for name, value in model.state_dict().items() if name != "final_logits_bias"}
    assert match(skeleton(model), memory(stored)).keys() == stored.keys()


def converters() -> dict[str, Callable[[], WeightConverter]]:
    """Conversions that no text model has yet, of a stored tensor into a Llama's."""
    names = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    up = "mlp.up_proj.weight"
    return {
        "chunk": lambda: WeightConverter("self_attn.kv.weight", names, [Chunk(dim=0)]),
        "transpose": lambda: WeightConverter("mlp.up.weight", up, [Transpose(0, 1)]),
        "transpose and chunk": lambda: WeightConverter("self_attn.kv.weight", names, [Transpose(0, 1), Chunk(dim=0)]),
        "interleave": lambda: WeightConverter("mlp.up.weight", up, [Interleave(dim=0)]),
        "interleave and chunk": lambda: WeightConverter("self_attn.kv.weight", names, [Interleave(dim=0), Chunk()]),
    }


@pytest.mark.parametrize("case", converters())
def test_other_operations(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**conversion_mapping._build_checkpoint_conversion_mapping(), "llama": [converters()[case]()]}
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", table)
    model = make("llama")
    model.save_pretrained(tmp_path)
    assert any(name.endswith(("mlp.up.weight", "kv.weight")) for name in open_weights(tmp_path).sources)
    expected = type(model).from_pretrained(tmp_path)
    assert torch.equal(expected.state_dict()["lm_head.weight"], model.lm_head.weight)
    found = check(tmp_path, expected)
    whole = any(callable(piece.place) for source in found.values() for piece in source.pieces)
    assert whole is ("interleave" in case)
