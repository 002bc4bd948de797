"""`match` refuses a checkpoint that does not fit the model and says what; leftovers of old checkpoints are no error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.errors import ModelError
from outpace.loading.names import match
from outpace.loading.open import open_weights
from outpace.loading.weights import Weights
from tests.loading.skeletons import make, memory, skeleton

CHECK = torch.ones(2)


def llama(**changes: Tensor | None) -> tuple[PreTrainedModel, Weights]:
    """A skeleton, and weights in which these tensors are replaced or, None, left out; __ stands for a dot."""
    model = make("llama")
    tensors = {**model.state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return skeleton(model), memory({name: value for name, value in tensors.items() if value is not None})


NORM = "model__norm__weight"
WRONG: Mapping[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({NORM: None}, r"missing: 1 \(model.norm.weight\); use"),
    "extra": ({"model__new": CHECK}, r"extra: 1 \(model.new\); use"),
    "a layer too many": ({"model__layers__2__norm__weight": CHECK}, r"extra: 1 \(model.layers.2.norm.weight\)"),
    "another shape": ({NORM: torch.ones(31)}, r"shape or kind: 1 \(model.norm.weight: \[31\] instead of \[32\]\)"),
    "another rank": ({NORM: torch.ones(32, 1)}, r"\[32, 1\] instead of \[32\]"),
    "integers": ({NORM: torch.ones(32, dtype=torch.int32)}, "model.norm.weight: int32 instead of float32"),
    "missing and extra": ({NORM: None, "model__n": CHECK}, r"missing: 1 \(model.norm.weight\); extra: 1 \(model.n\)"),
    "8 bits": ({NORM: torch.ones(32, dtype=torch.int8)}, r"quantized \(model.norm.weight is stored as int8\)"),
    "float8": (
        {NORM: torch.ones(32).to(torch.float8_e4m3fn)},
        "stored as float8_e4m3fn.*, and its config.json does not say how; put the quantization_config",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case: str) -> None:
    changes, says = WRONG[case]
    with pytest.raises(ModelError, match=says) as caught:
        match(*llama(**changes))
    assert str(caught.value).startswith("model: ")
    assert "memory" in str(caught.value)


def test_many_names_are_counted_and_five_told() -> None:
    empty, weights = llama()
    kept = {name: source for name, source in weights.sources.items() if "layers.1" not in name}
    with pytest.raises(ModelError, match=r"missing: 9 \((model\.layers\.1\.[\w.]+, ){5}\.\.\)"):
        match(empty, Weights("memory", kept))


def test_missing_names_cost_no_walk_each(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, weights = llama()
    walks, walk = [], nn.Module.named_buffers

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        walks.append(self)
        return walk(self, *args, **options)

    monkeypatch.setattr(nn.Module, "named_buffers", counted)
    with pytest.raises(ModelError, match="missing: "):
        match(empty, Weights("memory", dict(list(weights.sources.items())[:1])))
    assert sum(module is empty for module in walks) == 1


def test_floats_where_the_model_wants_integers() -> None:
    stored = nn.BatchNorm1d(2).state_dict() | {"num_batches_tracked": torch.tensor(1.0)}
    with pytest.raises(ModelError, match="num_batches_tracked: float32 instead of int64"):
        match(nn.BatchNorm1d(2), memory(stored))


def test_a_base_model_lacks_the_head(tmp_path: Path) -> None:
    model = make("bert")
    model.base_model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"do not fit BertForMaskedLM; tensors missing: 5 \(cls.predictions.bias, "):
        match(skeleton(model), open_weights(tmp_path))


def test_a_module_in_two_places_cannot_have_two_values() -> None:
    linear = nn.Linear(2, 2)
    stored = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).state_dict()
    with pytest.raises(ModelError, match=r"1.weight and 0.weight are one weight"):
        match(nn.ModuleList([linear, linear]), memory(stored))


def test_a_missing_expert(tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [name for name in tensors if ".layers.0." in name and ".experts.1." in name]
    save_file({name: value for name, value in tensors.items() if name not in lost}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts.gate_up_proj: \[3, 96, 32\] instead of \[4, 96, 32\]"):
        match(skeleton(model), open_weights(tmp_path))
    save_file({name: value for name, value in tensors.items() if name != lost[0]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts.* cannot be made of its 7 stored tensors"):
        match(skeleton(model), open_weights(tmp_path))


def test_quantized_in_a_way_that_is_not_read() -> None:
    empty, weights = llama()
    empty.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(
        ModelError, match="model: memory: quantization_config: quant_method 'bitsandbytes' is not supported; its"
    ):
        match(empty, weights)


MASK = torch.ones(1, 1, 4, 4, dtype=torch.bool)
IGNORED: Mapping[str, tuple[str, dict[str, Tensor]]] = {
    "masks of old GPT-2": ("gpt2", {"transformer.h.0.attn.bias": MASK}),
    "masks of old GPT-J": (
        "gptj",
        {"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": torch.tensor(-1e9)},
    ),
    "rotary tables": (
        "llama",
        {"model.layers.0.self_attn.rotary_emb.inv_freq": CHECK, "model.rotary_emb.inv_freq": CHECK},
    ),
    "rotary tables under another name": ("gemma3", {"model.layers.1.self_attn.rotary_emb.inv_freq": CHECK}),
    "positions": ("bert", {"bert.embeddings.position_ids": torch.arange(64)}),
    "heads of other classes": (
        "bert",
        {"bert.pooler.dense.weight": CHECK, "cls.seq_relationship.weight": CHECK, "cls.seq_relationship.bias": CHECK},
    ),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_old_checkpoints_have_is_no_error(case: str) -> None:
    family, more = IGNORED[case]
    model = make(family)
    assert match(skeleton(model), memory(model.state_dict() | more)).keys() == model.state_dict().keys()


def test_a_parameter_that_looks_like_an_old_mask_is_extra() -> None:
    model = make("gptj")
    with pytest.raises(ModelError, match="extra: 1"):
        match(skeleton(model), memory(model.state_dict() | {"transformer.h.0.attn.bias": CHECK}))
