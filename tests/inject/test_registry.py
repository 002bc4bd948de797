"""Policies that people register, and the document that tells how."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import outpace
from outpace import ConfigError, ModelRoles, Policy, register_policy
from outpace.inject.modules import FusedLayer
from outpace.inject.policies import REGISTRY, by_class
from outpace.inject.policies.llama import LLAMA
from tests.models import padded, prompts, tiny

DOCUMENT = Path(__file__).parents[2] / "docs/adding-a-model.md"


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without registered policies, and leaves none behind."""
    monkeypatch.setattr(REGISTRY, "policies", {})


class OtherLayer(LlamaDecoderLayer):
    """A layer that no policy of ours knows by name."""


def with_other_layers() -> Any:
    """A tiny Llama whose layers are of another class."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.__class__ = OtherLayer
    return model


def fused(engine: outpace.InferenceEngine) -> list[FusedLayer]:
    return [module for module in engine.modules() if isinstance(module, FusedLayer)]


def test_a_registered_policy_is_used() -> None:
    register_policy(replace(LLAMA, layers=("OtherLayer",)))
    engine = outpace.init_inference(with_other_layers(), kernel_inject=True, device="cpu")
    inputs = padded(prompts(9, 4), "left")
    assert len(fused(engine)) == 2
    expected = tiny("llama").generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(**inputs, max_new_tokens=12, do_sample=False), expected)


def test_a_registered_policy_stands_before_our_own() -> None:
    mine = replace(LLAMA, layers=("LlamaDecoderLayer",), norm_eps=1e-3)
    register_policy(mine)
    assert by_class()["LlamaDecoderLayer"] is mine
    assert by_class()["MistralDecoderLayer"] is LLAMA
    engine = outpace.init_inference(tiny("llama"), kernel_inject=True, device="cpu")
    assert [layer.attn_norm.eps for layer in fused(engine)] == [1e-3, 1e-3]


def test_a_policy_for_several_classes() -> None:
    mine = replace(LLAMA, layers=("OneLayer", "OtherLayer"))
    register_policy(mine)
    assert by_class()["OneLayer"] is by_class()["OtherLayer"] is mine


def test_another_policy_for_the_same_class_is_refused_unless_it_replaces() -> None:
    first = replace(LLAMA, layers=("OtherLayer",))
    second = replace(LLAMA, layers=("NewLayer", "OtherLayer"), gated=False)
    register_policy(first)
    with pytest.raises(ConfigError, match=r"register_policy: OtherLayer has another policy already; give replace=True"):
        register_policy(second)
    assert by_class()["OtherLayer"] is first
    assert "NewLayer" not in by_class(), "all or nothing"
    register_policy(second, replace=True)
    assert by_class()["OtherLayer"] is by_class()["NewLayer"] is second


def test_the_same_policy_may_be_registered_again() -> None:
    for _ in range(2):  # a cell of a notebook that is run twice
        register_policy(replace(LLAMA, layers=("OtherLayer",)))
    assert by_class()["OtherLayer"].qkv == LLAMA.qkv


@pytest.mark.parametrize("wrong", [OtherLayer, {"OtherLayer": LLAMA}, None])
def test_what_is_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="register_policy: expected a Policy, got "):
        register_policy(wrong)


def test_the_public_names_are_the_ones_that_injection_uses() -> None:
    assert isinstance(LLAMA, Policy)
    assert isinstance(LLAMA.model, ModelRoles)
    assert {"register_policy", "Policy", "ModelRoles"} <= set(outpace.__all__)


def test_the_code_in_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "document"}
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, DOCUMENT.name, "exec"), names)
    said = capsys.readouterr().out
    assert len(blocks) == 7
    assert by_class()["BirchLayer"] is names["BIRCH"]
    assert re.search(r"model\.layers\.0 is off by \d+%", said)
    assert "injection: BirchLayer has no 'mix.out_proj'; nearest: mix.proj" in said
