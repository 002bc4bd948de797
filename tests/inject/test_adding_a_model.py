"""Policies for layers that Outpace does not know, and the document that tells how to write one."""

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
from outpace.inject.policies import by_class
from outpace.inject.policies.llama import LLAMA
from tests.models import byte_tokenizer, padded, prompts, tiny

DOCUMENT = Path(__file__).parents[2] / "docs/adding-a-model.md"


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


def test_a_policy_for_layers_that_outpace_does_not_know() -> None:
    engine = outpace.init_inference(with_other_layers(), injection_policy={OtherLayer: LLAMA}, device="cpu")
    inputs = padded(prompts(9, 4), "left")
    assert len(fused(engine)) == 2
    expected = tiny("llama").generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(**inputs, max_new_tokens=12, do_sample=False), expected)


def test_the_callers_policy_is_used_instead_of_ours_in_an_llm(tmp_path: Path) -> None:
    tiny("llama", vocab_size=300).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    asked: list[int] = []

    def scale(config: Any, index: int) -> float:
        asked.append(index)
        return float(config.head_dim**-0.5)

    mine = replace(LLAMA, readers={"scale": scale})
    with outpace.LLM(tmp_path, device="cpu", injection_policy={LlamaDecoderLayer: mine}) as llm:
        (output,) = llm.generate("hi", outpace.SamplingParams(max_tokens=2, temperature=0))
    assert len(output.outputs[0].token_ids) == 2
    assert set(asked) == {0, 1}


def test_register_policy_says_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"register_policy: .* injection_policy={LayerClass: policy}"):
        register_policy(LLAMA)


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
    assert fused(names["engine"])[0].policy.qkv == names["BIRCH"].qkv
    assert "BirchLayer" not in by_class(), "nothing is kept for the next call"
    assert re.search(r"model\.layers\.0 is off by \d+%", said)
    assert "injection: BirchLayer has no 'mix.out_proj'; nearest: mix.proj" in said
