"""Quantized experts through the public face: of every policy, behind the routers of other models, however they run."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import LLM, ConfigError, ModelError, NotSupported, SamplingParams
from outpace.inject.quantized import PackedExperts, PackedLinear
from outpace.loading import fill, stream, targets
from tests.inject.checks import padded_prompts
from tests.inject.mixtures import MIXTURES, mixture
from tests.inject.own_mixtures import Mine, inputs, net
from tests.models import prompts
from tests.quant.fake import fake_quantized, fake_quantized_experts, rounded, rounded_fp8
from tests.quant.mixtures import RULES, latent, only

POLICIES = pytest.mark.parametrize("case", {family: case for case, (family, _) in MIXTURES.items()}.values())
INPUTS = padded_prompts(97)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def engine(model: Any, quant: dict[str, Any], *, inject: bool = True, **options: Any) -> Any:
    return outpace.init_inference(model, device="cpu", dtype="fp32", kernel_inject=inject, quant=quant, **options)


def packed(model: Any) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


@POLICIES
@pytest.mark.parametrize("rule", RULES)
def test_every_policy_has_the_tokens_of_fake_quantized_experts(case: str, rule: str) -> None:
    quant, fake = RULES[rule]
    want = fake_quantized_experts(mixture(case), **fake).generate(**INPUTS, **GREEDY)
    found = engine(mixture(case), quant)
    assert packed(found.module)
    assert not any(isinstance(module, PackedLinear) for module in found.module.modules())
    assert torch.equal(found.generate(**INPUTS, **GREEDY), want)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=INPUTS["input_ids"]).logits
    return found


def check_logits(found: Any, want: torch.Tensor, plain: torch.Tensor, *, activations: bool = False) -> None:
    """Close, beside what quantization changes: a row at the border between two steps may go either way."""
    limit = 0.25 if activations else 0.02
    assert (logits(found) - want).abs().max() <= limit * (plain - want).abs().max() + 1e-4


@pytest.mark.parametrize("case", ["qwen2", "gpt-oss", "glm4"])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "w8a8"])
def test_a_scheme_is_for_linears_and_experts(case: str, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Schemes that quantize activations leave those of experts alone, but for many tokens on a GPU; the log says so."""
    how: Any = rounded_fp8 if scheme == "fp8" else rounded
    rows: dict[str, Any] = {} if scheme == "int8" else {"activations": how}
    want = logits(fake_quantized_experts(fake_quantized(mixture(case), how, **rows), how))
    with caplog.at_level(logging.INFO, logger="outpace"):
        found = engine(mixture(case), {"scheme": scheme})
    said = [record.getMessage() for record in caplog.records if "quantized experts" in record.getMessage()]
    assert bool(said) == bool(rows)
    check_logits(found, want, logits(mixture(case)), activations=bool(rows))


@pytest.mark.parametrize("make", [latent, *(partial(mixture, case) for case in ("mixtral", "qwen2", "granite"))])
@pytest.mark.parametrize("inject", [True, False])
def test_experts_that_injection_leaves_alone(make: Any, inject: bool) -> None:
    want = logits(fake_quantized_experts(fake_quantized(make())))
    found = engine(make(), {"scheme": "int8"}, inject=inject, moe={"enabled": False})
    assert packed(found.module)
    check_logits(found, want, logits(make()))


@pytest.mark.parametrize(("inject", "linears"), [(True, 6), (False, 12)])
def test_rules_may_leave_experts_alone(inject: bool, linears: int) -> None:
    found = engine(mixture("mixtral"), {"weight": {"post_init_quant": {"self_attn": {}}}}, inject=inject)
    assert not packed(found.module)
    assert sum(isinstance(module, PackedLinear) for module in found.module.modules()) == linears


@pytest.mark.parametrize("quant", [{"scheme": "int8"}, {"scheme": "int4"}, {"weight": {"per_tensor": True}}], ids=str)
def test_lists_of_experts_of_one_s_own(quant: dict[str, Any]) -> None:
    """Fused or not, they are the same: what is fused has scales of its own for each expert too."""
    fused, alone = (engine(net(Mine), quant, inject=inject) for inject in (True, False))
    assert packed(fused.module)
    assert not packed(alone.module)
    torch.testing.assert_close(fused(inputs())[0], alone(inputs())[0])


def test_only_one_of_the_stacks() -> None:
    found = engine(mixture("qwen3"), {"weight": {"post_init_quant": {"experts.down_proj": {"symmetric": True}}}})
    for experts in packed(found.module):
        assert (experts.gate_up.dtype, experts.down.dtype) == (torch.float32, torch.int8)
    model = mixture("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            for expert in layer.mlp.experts.down_proj:
                expert.copy_(rounded(expert))
    check_logits(found, logits(model), logits(mixture("qwen3")))


@pytest.mark.parametrize("make", [lambda: mixture("qwen3"), latent], ids=["level 1", "level 0"])
def test_batches_chunks_prefixes_and_preemption_change_no_token(make: Any) -> None:
    shared = prompts(20, seed=5)[0].tolist()
    asked = [shared + row.tolist() for row in prompts(3, 9, 14, 5, seed=1)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "quantization": "int4"}
    alone = LLM(make(), **options, enable_prefix_caching=False)
    expected = [alone.generate({"prompt_token_ids": one}, params)[0].outputs[0].token_ids for one in asked]
    small: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 16, "num_blocks": 8}
    together = LLM(make(), **options, **small)
    for _ in range(2):  # the second time prefixes are in the cache
        found = together.generate([{"prompt_token_ids": one} for one in asked], params)
        assert [each.outputs[0].token_ids for each in found] == expected


def test_deterministic() -> None:
    asked = [{"prompt_token_ids": row.tolist()} for row in prompts(3, 9, 14, seed=1)]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1)
    options: dict[str, Any] = {"quantization": "int4", "deterministic": True, "enable_prefix_caching": False}
    llm = LLM(mixture("gpt-oss"), device="cpu", dtype="fp32", **options)
    alone = [llm.generate(one, params)[0].outputs[0].logprobs for one in asked]
    assert [each.outputs[0].logprobs for each in llm.generate(asked, params)] == alone


@pytest.mark.parametrize(("case", "inject"), [("mixtral", True), ("mixtral", False), ("gpt-oss", True)])
def test_checkpoints_become_what_a_live_module_becomes(case: str, inject: bool, tmp_path: Path) -> None:
    """Mixtral's stores each expert for itself, GPT-OSS's stores stacks with gates and ups in turn."""
    model = mixture(case)
    model.save_pretrained(tmp_path)
    with outpace.OnDevice("meta"):
        empty = type(model)(type(model.config).from_pretrained(tmp_path))
    quant = only(num_bits=4, group_size=8)
    found = engine(empty, quant, inject=inject, checkpoint=str(tmp_path))
    assert torch.equal(logits(found), logits(engine(mixture(case), quant, inject=inject)))


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small reads by more threads than there are stacks in a layer."""
    monkeypatch.setattr(stream, "CHUNK", 4096)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))


@pytest.mark.usefixtures("many_threads")
def test_experts_of_one_layer_are_in_memory_in_the_model_s_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture("qwen3", num_experts=16, moe_intermediate_size=64)
    model.save_pretrained(tmp_path)
    live: dict[int, int] = {}
    most: list[int] = []
    begin, end = fill._Waiting.begin, fill._Waiting.end

    def begun(self: fill._Waiting) -> Any:
        live[id(self)] = self.held
        most.append(sum(list(live.values())))
        return begin(self)

    def ended(self: fill._Waiting) -> None:
        end(self)
        del live[id(self)]

    monkeypatch.setattr(fill._Waiting, "begin", begun)
    monkeypatch.setattr(fill._Waiting, "end", ended)
    LLM(tmp_path, device="cpu", dtype="fp32", quantization="int4")
    assert max(most) <= sum(parameter.nbytes for parameter in model.model.layers[0].mlp.experts.parameters())


@pytest.mark.usefixtures("many_threads")
def test_a_stack_that_cannot_be_quantized_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: targets.Target, weight: torch.Tensor) -> None:
        raise ModelError("model: it is broken")

    mixture("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr(targets.Target, "give", fail)
    with pytest.raises(ModelError, match="it is broken"):
        LLM(tmp_path, device="cpu", dtype="fp32", quantization="int4")


def test_what_was_quantized_is_counted() -> None:
    llm = LLM(mixture("mixtral"), device="cpu", dtype="fp32", quantization="int8")
    experts, others = 3 * 4 * 3 * 40 * 48, 3 * (48 * 80 + 48 * 48) + 97 * 48
    assert llm.quantized is not None
    assert llm.quantized.weights == 3 * 4 + 1
    assert llm.quantized.before == 4 * (experts + others)
    scales = 3 * (4 * (80 + 48) + 80 + 48) + 97
    assert llm.quantized.after == experts + others + 4 * scales


def test_what_is_refused() -> None:
    with pytest.raises(
        NotSupported, match=r"quant: model.layers.0.mlp.experts \(GptOssExperts\) has a gate of its own"
    ):
        engine(mixture("gpt-oss"), {"scheme": "int8"}, inject=False)
    with pytest.raises(ConfigError, match=r"group_size: 9 does not divide the 48 columns of .*experts\.gate_up_proj"):
        engine(mixture("mixtral"), only(group_size=9))
