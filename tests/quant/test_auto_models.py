"""quant.auto through the public face: bounds hold on the finished model, and its plan makes the same one again."""

import json
import logging
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import outpace
from outpace import LLM, ConfigError, ModelError, SamplingParams
from outpace.inject.quantized import PackedLinear
from outpace.loading import measure_plan
from outpace.quant.plan import QuantPlan
from tests.models import tiny

CPU: dict[str, Any] = {"device": "cpu", "dtype": "fp32"}


def written_by(model: Any, sequences: int = 12) -> list[int]:
    """Tokens that the model itself would write, so that another model predicts them worse."""
    torch.manual_seed(3)
    begin = torch.randint(3, 97, (sequences, 1))
    rows = model.generate(begin, max_new_tokens=63, do_sample=True, top_k=0)
    return [int(token) for token in rows.flatten()]


@pytest.fixture(scope="module")
def text() -> list[int]:
    return written_by(tiny("llama"))


def perplexity(model: Any, ids: list[int]) -> float:
    """In windows of 64, by separate code; the first token of each has no context."""
    rows = torch.tensor(ids).view(-1, 64)
    with torch.inference_mode():
        logits = model(input_ids=rows).logits[:, :-1].float()
    return math.exp(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item())


def auto(text: list[int], tokens: int = 512, **bound: Any) -> dict[str, Any]:
    return {"quant": {"auto": bound, "calibration": {"text": text, "tokens": tokens}}}


def tensors(engine: outpace.InferenceEngine) -> dict[str, torch.Tensor]:
    return dict(engine.module.named_parameters())


@pytest.mark.parametrize("inject", [True, False])
def test_the_bound_holds_and_the_plan_makes_the_same_model_again(inject: bool, text: list[int], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = outpace.init_inference(
        tiny("llama"), **CPU, kernel_inject=inject, **auto(text, max_perplexity_increase=0.03, out=str(path))
    )
    before, after = perplexity(tiny("llama"), text[:512]), perplexity(found, text[:512])
    assert after <= 1.03 * before + 1e-3
    plan = QuantPlan.read(str(path))
    assert plan.calibration is not None
    assert plan.evaluation is not None
    assert (plan.calibration.before, plan.calibration.after) == pytest.approx((before, after), rel=1e-3)
    assert plan.evaluation.text == "the rest of given tokens"
    assert plan.evaluation.after == pytest.approx(perplexity(found, text[512:]), rel=1e-3)
    schemes = {weight.got for weight in plan.weights}
    assert len(schemes) > 1, "some weights are worth more than others"
    assert "q_proj, k_proj, v_proj" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with mock.patch("outpace.prepare.measured_plan", side_effect=AssertionError("it was measured again")):
        for source in (str(path), json.loads(path.read_text())):
            again = outpace.init_inference(tiny("llama"), **CPU, kernel_inject=inject, quant={"plan": source})
            assert tensors(again).keys() == tensors(found).keys()
            assert all(torch.equal(tensor, tensors(found)[name]) for name, tensor in tensors(again).items())
        other = outpace.init_inference(tiny("llama"), **CPU, kernel_inject=not inject, quant={"plan": str(path)})
    assert perplexity(other, text[:512]) == pytest.approx(after, rel=1e-3), "a plan fits with and without injection"


def test_a_tighter_bound_takes_more_bytes(text: list[int]) -> None:
    sizes = []
    for bound in (0.3, 0.01, 1e-9):
        engine = outpace.init_inference(tiny("llama"), **CPU, **auto(text, max_perplexity_increase=bound))
        sizes.append(sum(tensor.nbytes for tensor in tensors(engine).values()))
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("source", ["live", "checkpoint"])
def test_a_budget_of_bytes_is_kept_by_the_whole_model(source: str, text: list[int], tmp_path: Path) -> None:
    model: Any = tiny("llama", tie_word_embeddings=True)
    whole = sum(tensor.nbytes for tensor in model.parameters())
    if source == "checkpoint":
        model.save_pretrained(tmp_path)
        model = tmp_path
    llm = LLM(model, **CPU, **auto(text, max_bytes=whole // 2))
    assert llm.quantized is not None
    plan = llm.quantized.plan
    assert plan is not None
    head = plan.weights[-1]
    assert (head.names, head.got) == (("lm_head.weight",), "as it is"), "its copy would need memory of its own"
    held = whole - sum(4 * math.prod(weight.shape) for weight in plan.weights[:-1])
    assert 0.8 * whole / 2 <= held + sum(weight.nbytes for weight in plan.weights[:-1]) <= whole / 2
    answer = llm.generate({"prompt_token_ids": text[:9]}, SamplingParams(max_tokens=3, temperature=0))
    assert len(answer[0].outputs[0].token_ids) == 3


def test_bits_per_weight_and_the_log(text: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outpace"):
        llm = LLM(tiny("llama"), **CPU, **auto(text, bits_per_weight=8.0, schemes=["int4", "w8a8", "fp8"]))
    assert llm.quantized is not None
    plan = llm.quantized.plan
    assert plan is not None
    assert plan.bits_per_weight <= 8.0
    lines = [record.getMessage() for record in caplog.records]
    for weight in plan.weights:
        assert f"{weight.title}: {weight.got} ({weight.why})" in lines
    assert any(line.startswith("quant.auto: calibration: perplexity") for line in lines)
    assert set(plan.weights[0].estimates) == {
        "int4 per channel", "int8 per channel, activations int8", "fp8 per channel, activations fp8"
    }  # fmt: skip


@pytest.mark.parametrize("inject", [True, False])
def test_experts_are_chosen_too(inject: bool, tmp_path: Path) -> None:
    text, path = written_by(tiny("mixtral"), 8), tmp_path / "plan.json"
    asked = auto(text, 256, bits_per_weight=8.5, out=str(path))
    engine = outpace.init_inference(tiny("mixtral"), **CPU, kernel_inject=inject, **asked)
    experts = [weight for weight in QuantPlan.read(str(path)).weights if "experts" in weight.names[0]]
    assert len(experts) == 4, "two stacks of each layer"
    assert {len(weight.shape) for weight in experts} == {3}
    assert any(weight.scheme is not None for weight in experts)
    assert perplexity(engine, text[:256]) <= 1.5 * perplexity(tiny("mixtral"), text[:256])


def test_estimates_are_near_what_single_weights_really_add(text: list[int], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = auto(text, 704, bits_per_weight=12.0, schemes=["int4"], out=str(path))
    outpace.init_inference(tiny("llama"), **CPU, kernel_inject=True, **asked)
    before, total, estimated = perplexity(tiny("llama"), text), 0.0, 0.0
    for weight in QuantPlan.read(str(path)).weights:
        if weight.names == ("lm_head.weight",):
            continue
        rules = {name: {"num_bits": 4, "symmetric": True} for name in weight.names}
        alone = outpace.init_inference(tiny("llama"), **CPU, quant={"weight": {"post_init_quant": rules}})
        total += math.log(perplexity(alone, text) / before)
        estimated += weight.estimates["int4 per channel"]
    assert 0.3 <= estimated / total <= 3


def test_a_module_that_was_measured_and_refused_is_as_it_was(text: list[int]) -> None:
    model = tiny("llama")
    model.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"quant\.auto\.max_bytes: with .* the minimum is .* KB; allow more"):
        outpace.init_inference(model, **CPU, kernel_inject=True, **auto(text, max_bytes=1000))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert perplexity(model, text) == pytest.approx(perplexity(tiny("llama"), text), rel=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_callers_inference_mode_does_not_matter(text: list[int], tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with torch.inference_mode():
        llm = LLM(tmp_path, **CPU, **auto(text, 128, bits_per_weight=8))
    assert llm.quantized is not None
    assert llm.quantized.plan is not None


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "encoder": ("bert", auto([5] * 64, bits_per_weight=8), ConfigError, "quant.auto: BertForMaskedLM predicts no next"),
    "no tokenizer": (
        "llama",
        {"quant": {"auto": {"bits_per_weight": 8}}},
        ConfigError,
        r"quant\.calibration\.text: the model has no tokenizer to read a text with; .* give token ids",
    ),
    "a foreign token": (
        "llama",
        auto([5, 97] * 32, bits_per_weight=8),
        ConfigError,
        r"quant\.calibration\.text: token 97 is not among the 97 tokens",
    ),
    "too short": (
        "llama",
        auto([5], bits_per_weight=8),
        ConfigError,
        r"quant\.calibration\.text: 1 tokens are too few",
    ),
    "no file": (
        "llama",
        {"quant": {"auto": {"bits_per_weight": 8}, "calibration": {"text": "no such file"}}},
        ConfigError,
        r"quant\.calibration\.text: cannot read no such file",
    ),
    "no folder": (
        "llama",
        auto([5] * 64, bits_per_weight=8, out="no/such/folder/plan.json"),
        ConfigError,
        r"quant\.auto\.out: there is no folder no/such/folder",
    ),
    "bits": (
        "llama",
        auto([5] * 64, bits_per_weight=1),
        ConfigError,
        r"quant\.auto\.bits_per_weight: .* the minimum is",
    ),
    "qkv": (
        "llama",
        {"quant": {**auto([5] * 64, bits_per_weight=5)["quant"], "qkv": {"enabled": False}}},
        ConfigError,
        r"quant\.auto\.bits_per_weight: .* the minimum is",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    family, asked, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says):
        outpace.init_inference(tiny(family), **CPU, **asked)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: list[int]
) -> None:
    tiny("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(measure_plan, "free_bytes", lambda device: 10_000)
    with pytest.raises(
        ModelError, match=r"quant\.auto: the whole model \(.* in float32\) is on cpu while .* quant\.plan"
    ):
        LLM(tmp_path, **CPU, **auto(text, bits_per_weight=8))


@pytest.fixture(scope="module")
def plan(text: list[int]) -> dict[str, Any]:
    llm = LLM(tiny("llama"), **CPU, **auto(text, 256, bits_per_weight=8))
    assert llm.quantized is not None
    assert llm.quantized.plan is not None
    found: dict[str, Any] = llm.quantized.plan.model_dump(mode="json")
    return found


def with_scheme(plan: dict[str, Any], scheme: dict[str, Any]) -> dict[str, Any]:
    first, *others = plan["weights"]
    return plan | {"weights": [first | {"scheme": scheme}, *others]}


BAD: dict[str, tuple[Any, str]] = {
    "version": (
        lambda plan: plan | {"version": 2},
        r"quant\.plan\.version: input should be 1, got 2; .* make",
    ),
    "unknown": (lambda plan: plan | {"wieghts": []}, r"quant\.plan: unknown name 'wieghts': did you mean 'weights'"),
    "values": (
        lambda plan: plan | {"weights": [plan["weights"][0] | {"scheme": {"values": "int3"}}]},
        r"quant\.plan\.weights\.0\.scheme\.values: input should be 'int8', 'int4' or 'fp8', got 'int3'",
    ),
    "fp8 with zeros": (
        lambda plan: with_scheme(plan, {"values": "fp8", "symmetric": False}),
        r"quant\.plan\.weights\.0\.scheme: fp8 has one scale for each row and no zeros",
    ),
    "activations": (
        lambda plan: with_scheme(plan, {"values": "int8", "activations": "fp8"}),
        r"quant\.plan\.weights\.0\.scheme: activations fp8 do not go with int8 values",
    ),
    "a group that divides nothing": (
        lambda plan: with_scheme(plan, {"values": "int4", "group": 12}),
        r"quant\.plan\.weights\.0: scheme\.group 12 does not divide the 32 columns; give a divisor",
    ),
    "a small group": (
        lambda plan: with_scheme(plan, {"values": "int4", "group": 1}),
        r"quant\.plan\.weights\.0\.scheme\.group: input should be greater than or equal to 8, got 1",
    ),
    "rows": (
        lambda plan: plan | {"weights": [plan["weights"][0] | {"shape": [-1, 32]}, *plan["weights"][1:]]},
        r"quant\.plan\.weights\.0\.shape\.0: input should be greater than 0",
    ),
    "model": (
        lambda plan: plan | {"model": "MistralForCausalLM"},
        r"quant\.plan\.model: the plan was made for a MistralForCausalLM, and this is a LlamaForCausalLM; make a plan",
    ),
    "nothing": (lambda plan: {}, r"quant\.plan\.version: field required; model: field required; "),
    "no weights": (lambda plan: plan | {"weights": []}, r"quant\.plan\.weights: "),
    "twice": (
        lambda plan: plan | {"weights": [*plan["weights"], plan["weights"][0]]},
        r"quant\.plan\.weights: model\.layers\.0\.self_attn\.k_proj\.weight is named twice",
    ),
    "missing": (
        lambda plan: plan | {"weights": plan["weights"][1:]},
        r"quant\.plan: it has no entry for model\.layers\.0\.self_attn\.q_proj\.weight; make a plan for this model",
    ),
    "another": (
        lambda plan: plan | {"weights": [*plan["weights"], plan["weights"][0] | {"names": ["model.other.weight"]}]},
        r"quant\.plan: LlamaForCausalLM has no linear model\.other\.weight",
    ),
    "columns": (
        lambda plan: plan | {"weights": [plan["weights"][0] | {"shape": [64, 64]}, *plan["weights"][1:]]},
        r"quant\.plan: model\.layers\.0\.self_attn\.q_proj\.weight has 64 columns in the plan, but 32 in the model",
    ),
    "no file": (lambda plan: "no such file.json", r"quant\.plan: cannot read no such file\.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_is_refused_by_the_name_of_the_field(name: str, plan: dict[str, Any]) -> None:
    change, says = BAD[name]
    with pytest.raises(ConfigError, match=says):
        outpace.init_inference(tiny("llama"), **CPU, kernel_inject=True, quant={"plan": change(plan)})


def test_a_plan_that_splits_a_fused_weight_is_for_models_without_one(plan: dict[str, Any]) -> None:
    first = plan["weights"][0]
    q, others = first | {"names": first["names"][:1], "scheme": None}, first | {"names": first["names"][1:]}
    others["scheme"] = {"values": "int8"}
    split = plan | {"weights": [q, others, *plan["weights"][1:]]}
    with pytest.raises(ConfigError, match=r"quant\.plan: .*q_proj.* are one weight in the fused layer"):
        outpace.init_inference(tiny("llama"), **CPU, kernel_inject=True, quant={"plan": split})
    engine = outpace.init_inference(tiny("llama"), **CPU, quant={"plan": split})
    layer: Any = engine.module.get_submodule("model.layers.0.self_attn")
    assert [isinstance(part, PackedLinear) for part in (layer.q_proj, layer.k_proj, layer.v_proj)] == [
        False,
        True,
        True,
    ]
