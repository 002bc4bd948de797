"""Quantized models through the public face: they are what separate code makes of Hugging Face's, however they run."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from torch import nn

import outpace
from outpace import LLM, ConfigError, ModelError, NotSupported, SamplingParams
from outpace.inject.quantized import PackedLinear
from tests.inject.level0 import SMALL
from tests.loading.tiny import tiny_model, write_gguf
from tests.models import prompts, tiny
from tests.quant.fake import (
    fake_quantized,
    linears,
    rounded,
    rounded_asymmetric,
    rounded_by_tensor,
    rounded_fp8,
)

IDS = prompts(7, 7)
BATCH = torch.stack(IDS)
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8": ({"scheme": "int8"}, {}),
    "asymmetric": ({"weight": {"q_type": "asymmetric"}}, {"how": rounded_asymmetric}),
    "groups": ({"weight": {"group_size": 16}}, {"group": 16}),
    "per tensor": ({"weight": {"per_tensor": True}}, {"how": rounded_by_tensor}),
    "fp8": ({"scheme": "fp8"}, {"how": rounded_fp8, "activations": rounded_fp8}),
    "w8a8": ({"scheme": "w8a8"}, {"activations": rounded}),
}
NAMED = pytest.mark.parametrize("scheme", SCHEMES)


def olmo2() -> Any:
    """A family that no policy knows."""
    torch.manual_seed(0)
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL)).eval()


MODELS: dict[str, tuple[Any, bool]] = {
    "level 1": (lambda: tiny("llama"), True),
    "level 1, Conv1D": (lambda: tiny("gpt2"), True),
    "level 0": (olmo2, True),
    "no injection": (lambda: tiny("llama"), False),
    "Conv1D": (lambda: tiny("gpt2"), False),
    "subclass of Linear": (lambda: tiny("falcon"), False),
    "encoder": (lambda: tiny("bert"), True),
    "encoder, no injection": (lambda: tiny("bert"), False),
    "encoder-decoder": (lambda: tiny("t5"), False),
}


def logits(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": BATCH} if "T5" in type(getattr(model, "module", model)).__name__ else {}
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=BATCH, **more).logits
    return found


@NAMED
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_a_fake_quantized_model(kind: str, scheme: str) -> None:
    make, inject = MODELS[kind]
    quant, fake = SCHEMES[scheme]
    engine = outpace.init_inference(make(), device="cpu", dtype="fp32", kernel_inject=inject, quant=quant)
    plain, expected, found = logits(make()), logits(fake_quantized(make(), **fake)), logits(engine)
    limit = 0.25 if fake.get("activations") else 0.02  # a row at the border between two steps may go either way
    assert (found - expected).abs().max() <= limit * (plain - expected).abs().max() + 1e-4
    assert any(isinstance(module, PackedLinear) for module in engine.module.modules())


@NAMED
def test_a_plain_module(scheme: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 16, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(x)
            return result

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(3, 5, 48)
    quant, fake = SCHEMES[scheme]
    expected = fake_quantized(copy.deepcopy(net), **fake)(x)
    found = outpace.init_inference(net, device="cpu", dtype="fp32", quant=quant)(x)
    torch.testing.assert_close(found, expected, atol=2e-3 if fake.get("activations") else 1e-5, rtol=0)


def test_subclasses_of_linear_that_compute_alike_are_quantized_and_others_stay() -> None:
    class Alike(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ self.weight.T + self.bias

    class Plain(nn.Linear):
        """With nothing of its own."""

    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Odd(nn.Linear):
        def forward(self, input: torch.Tensor, more: int) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input)

    net = nn.ModuleList([Alike(16, 8), Plain(16, 8), Other(16, 8), Odd(16, 8), nn.MultiheadAttention(16, 2)])
    engine = outpace.init_inference(net, device="cpu", dtype="int8")
    kinds = [isinstance(module, PackedLinear) for module in engine.module.children()]
    assert kinds == [True, True, False, False, False]
    assert not isinstance(engine.module.get_submodule("4.out_proj"), PackedLinear), "its weight is read directly"


@pytest.mark.parametrize("inject", [True, False])
def test_generate_has_the_tokens_of_the_fake_quantized_model(inject: bool) -> None:
    expected = fake_quantized(tiny("llama")).generate(BATCH, max_new_tokens=20, do_sample=False)
    engine = outpace.init_inference(tiny("llama"), device="cpu", dtype="int8", kernel_inject=inject)
    assert torch.equal(engine.generate(BATCH, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize("scheme", ["int8", "int4", "w8a8", "fp8"])
@pytest.mark.parametrize("make", [lambda: tiny("llama"), olmo2], ids=["level 1", "level 0"])
def test_batches_chunks_prefixes_and_preemption_change_no_token(make: Any, scheme: str) -> None:
    shared = prompts(20, seed=5)[0].tolist()
    asked = [shared + row.tolist() for row in prompts(3, 9, 14, 5, seed=1)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    alone = LLM(make(), device="cpu", dtype="fp32", quantization=scheme, enable_prefix_caching=False)
    expected = [alone.generate({"prompt_token_ids": one}, params)[0].outputs[0].token_ids for one in asked]
    small: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 16, "num_blocks": 8}
    together = LLM(make(), device="cpu", dtype="fp32", quantization=scheme, **small)
    for _ in range(2):  # the second time prefixes are in the cache
        found = together.generate([{"prompt_token_ids": one} for one in asked], params)
        assert [each.outputs[0].token_ids for each in found] == expected


@pytest.mark.parametrize("quant", [{"scheme": "int8"}, {"scheme": "w8a8"}, {"scheme": "int4"}], ids=str)
def test_deterministic(quant: dict[str, Any]) -> None:
    asked = [{"prompt_token_ids": row.tolist()} for row in prompts(3, 9, 14, 5, seed=1)]
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1)
    llm = LLM(tiny("llama"), device="cpu", dtype="fp32", quant=quant, deterministic=True, enable_prefix_caching=False)
    alone = [llm.generate(one, params)[0].outputs[0].logprobs for one in asked]
    assert [each.outputs[0].logprobs for each in llm.generate(asked, params)] == alone


def tied(folder: Path | None = None) -> Any:
    model = tiny("llama", tie_word_embeddings=True)
    if folder is not None:
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("source", ["live", "checkpoint"])
def test_a_tied_head_is_quantized_and_the_embedding_stays(source: str, inject: bool, tmp_path: Path) -> None:
    expected, before = logits(fake_quantized(tied())), tied(tmp_path).model.embed_tokens.weight.clone()
    model, more = tied(), {}
    if source == "checkpoint":
        with outpace.OnDevice("meta"):
            model = hf.LlamaForCausalLM(hf.LlamaConfig.from_pretrained(tmp_path))
        more = {"checkpoint": str(tmp_path)}
    engine = outpace.init_inference(model, device="cpu", dtype="int8", kernel_inject=inject, **more)
    head: Any = engine.module.get_submodule("lm_head")
    embedding: Any = engine.module.get_submodule("model.embed_tokens")
    assert isinstance(head, PackedLinear)
    assert head.weight.dtype == torch.int8
    assert torch.equal(embedding.weight, before)
    torch.testing.assert_close(logits(engine), expected, atol=1e-4, rtol=0)


def logprobs(answer: Any) -> list[dict[int, float]]:
    return [{token: found.logprob for token, found in place.items()} for place in answer.logprobs]


@pytest.mark.parametrize("kind", ["safetensors", "bin", "gguf"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_checkpoints_become_what_a_live_module_becomes(kind: str, scheme: str, tmp_path: Path) -> None:
    model, source = tiny_model("llama"), tmp_path
    if kind == "gguf":
        source = write_gguf(tmp_path / "model.gguf", model, Kind.F32)
    elif kind == "safetensors":
        model.save_pretrained(tmp_path)
    else:
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    ids = {"prompt_token_ids": prompts(9)[0].tolist()}
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=3, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "quantization": scheme}
    found, expected = LLM(source, **options), LLM(model, **options)
    assert str(found.quantized) == str(expected.quantized)
    answers = [llm.generate(ids, params)[0].outputs[0] for llm in (found, expected)]
    assert answers[0].token_ids == answers[1].token_ids
    assert logprobs(answers[0]) == logprobs(answers[1])


def test_a_quantized_file_may_be_quantized_anew(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), Kind.Q8_0)
    llm = LLM(source, device="cpu", quantization="int4")
    assert llm.quantized is not None
    assert llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3))[0].outputs[0].token_ids


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "q_groups": ({"weight": {"q_groups": 5}}, r"quant\.weight\.q_groups: 5 does not divide the 32 columns of"),
    "group_size": ({"weight": {"group_size": 20}}, r"quant\.weight\.group_size: 20 does not divide the 32 columns"),
    "group_size of more than a row": (
        {"weight": {"group_size": 1024}},
        r"quant\.weight\.group_size: 1024 does not divide the 32 columns",
    ),
    "only mlp.down_proj": (
        {"weight": {"post_init_quant": {"down_proj": {"group_size": 32}}}},
        r"quant\.weight\.post_init_quant\.down_proj\.group_size: 32 does not divide the 48 columns of .*down_proj",
    ),
    "quantized_initialization": (
        {"weight": {"quantized_initialization": {"group_size": 20}}},
        r"quant\.weight\.quantized_initialization\.group_size: 20 does not divide the 32 columns",
    ),
    "a name that is not there": (
        {"weight": {"post_init_quant": {"o_proj": {}, "dense_h": {}}}},
        r"post_init_quant: no linear of LlamaForCausalLM has 'dense_h' in its name; names are like model\.",
    ),
    "two rules for one": (
        {"weight": {"post_init_quant": {"mlp": {}, "up_proj": {}}}},
        r"matches several rules \(mlp, up_proj\); let only one match",
    ),
}


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused_and_the_module_stays_as_it_was(name: str, inject: bool) -> None:
    quant, says = WRONG[name]
    model = tiny("llama")
    before, text = {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}, repr(model)
    with pytest.raises(ConfigError, match=says):
        outpace.init_inference(model, device="cpu", dtype="bf16", kernel_inject=inject, quant=quant)
    assert {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()} == before
    assert repr(model) == text
    assert next(model.parameters()).dtype == torch.float32


def test_rules_that_disagree_inside_a_fused_weight_are_refused() -> None:
    model = tiny("llama")
    quant: dict[str, Any] = {"weight": {"post_init_quant": {"q_proj": {}}}}
    with pytest.raises(ConfigError, match=r"q_proj.weight, .*k_proj.weight.* are one weight in the fused layer"):
        outpace.init_inference(model, device="cpu", kernel_inject=True, quant=quant)
    found = outpace.init_inference(model, device="cpu", quant=quant)
    packed = [path for path, each in found.module.named_modules() if isinstance(each, PackedLinear)]
    assert [path.rpartition(".")[2] for path in packed] == ["q_proj", "q_proj"]


@pytest.mark.parametrize("inject", [True, False])
def test_groups_of_4_bits_that_are_not_given_fit_each_weight(inject: bool) -> None:
    model = tiny("llama", intermediate_size=192)
    quant = {"weight": {"post_init_quant": {"mlp": {"num_bits": 4}}}}
    engine = outpace.init_inference(model, device="cpu", kernel_inject=inject, quant=quant)
    packed = [each for each in engine.module.modules() if isinstance(each, PackedLinear)]
    assert {(each.in_features, each.scheme.group) for each in packed} == {(32, None), (192, 64)}


def test_a_module_without_linears_is_refused() -> None:
    with pytest.raises(ConfigError, match="quant: Sequential has no linears that can be quantized; remove it"):
        outpace.init_inference(nn.Sequential(nn.Conv1d(3, 4, 5)), device="cpu", dtype="int8")


@pytest.mark.parametrize("family", ["t5", "bert", "llama", "gpt2"])
def test_projections_stay_without_injection(family: str) -> None:
    engine = outpace.init_inference(tiny(family), device="cpu", quant={"qkv": {"enabled": False}})
    packed = {path.rpartition(".")[2] for path, each in engine.module.named_modules() if isinstance(each, PackedLinear)}
    assert packed
    assert not packed & {"q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj", "c_attn"}


def test_qkv_is_refused_where_no_name_tells_the_projections() -> None:
    with pytest.raises(ConfigError, match=r"quant\.qkv: no linear of Sequential has a name that is known"):
        outpace.init_inference(nn.Sequential(nn.Linear(16, 16)), device="cpu", quant={"qkv": {"enabled": False}})


@pytest.mark.parametrize("inject", [True, False])
def test_a_quantized_model_is_not_saved(inject: bool, tmp_path: Path) -> None:
    engine: Any = outpace.init_inference(tiny("llama"), device="cpu", dtype="int8", kernel_inject=inject)
    with pytest.raises(NotSupported, match="save_pretrained: fused or quantized weights cannot be loaded"):
        engine.module.save_pretrained(tmp_path)


def test_a_model_that_looks_at_the_dtype_of_a_weight_is_refused_when_it_runs() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.proj(x.to(self.proj.weight.dtype))
            return result

    engine = outpace.init_inference(Casting(), device="cpu", dtype="int8")
    with pytest.raises(ModelError, match=r"got rows of torch.int8: .* name other linears"):
        engine(torch.ones(2, 16))


def test_a_quantized_module_is_not_quantized_again() -> None:
    model = tiny("llama")
    outpace.init_inference(model, device="cpu", dtype="int8")
    with pytest.raises(ModelError, match="its linears are quantized already"):
        outpace.init_inference(model, device="cpu", quant={"scheme": "int4"})


@pytest.mark.parametrize("quant", [None, {"scheme": "int8"}, {"scheme": "int4"}])
@pytest.mark.parametrize("inject", [False, True])
def test_a_module_that_an_engine_changed_is_for_no_other_engine(quant: dict[str, Any] | None, inject: bool) -> None:
    if quant is None and not inject:
        return  # nothing was changed
    options = {} if quant is None else {"quant": quant}
    engine = outpace.init_inference(tiny("llama"), device="cpu", dtype="fp32", kernel_inject=inject, **options)
    before = logits(engine)
    with pytest.raises(ModelError, match=r"already; use the engine that it is part of, or load the model again"):
        outpace.init_inference(engine.module, device="cpu", dtype="bf16")
    assert torch.equal(logits(engine), before)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_linears_that_cannot_be_quantized_stay() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    spectral = nn.utils.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(16, 16), normed, spectral, nn.Linear(16, 0, bias=False), nn.Linear(0, 5))
    engine = outpace.init_inference(model, device="cpu", dtype="fp32", quant={"scheme": "int8"})
    assert [isinstance(each, PackedLinear) for each in model] == [True, False, False, False, False]
    assert engine(torch.ones(2, 16)).shape == (2, 5)


def test_a_linear_alone_has_no_module_to_be_swapped_in() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no linears .* is one: put it into an nn\.Sequential"):
        outpace.init_inference(nn.Linear(16, 5), device="cpu", quant={"scheme": "int8"})


def test_auto_is_no_scheme() -> None:
    asked: tuple[dict[str, Any], ...] = (
        {"quantization": "auto"},
        {"quant": {"scheme": "auto"}},
        {"quant": {"scheme": "auto"}, "kv_cache_dtype": "int8"},
    )
    for options in asked:
        with pytest.raises(ConfigError, match=r"(quantization|quant\.scheme): 'auto' is not a scheme; .* quant="):
            LLM(tiny("llama"), device="cpu", **options)


def test_no_quantization_beside_a_quantized_cache_leaves_the_weights_alone() -> None:
    assert LLM(tiny("llama"), device="cpu", quantization=None, kv_cache_dtype="int8").quantized is None


def test_a_model_without_a_cache_takes_no_kv_cache_dtype() -> None:
    with pytest.raises(ConfigError, match=r"quant\.kv_cache_dtype: BertForMaskedLM has no KV cache"):
        outpace.init_inference(tiny("bert"), device="cpu", kernel_inject=True, quant={"kv_cache_dtype": "int8"})


@pytest.mark.parametrize("scheme", ["int8", "w8a8"])
@pytest.mark.parametrize("width", [15, 17, 32])
def test_rows_of_another_width_are_refused(scheme: str, width: int) -> None:
    engine = outpace.init_inference(nn.Sequential(nn.Linear(16, 5)), device="cpu", quant={"scheme": scheme})
    with pytest.raises(ModelError, match=f"linear of 16 columns got rows of {width}"):
        engine(torch.ones(2, width))


def test_hooks_on_a_swapped_linear_are_called() -> None:
    model, seen = tiny("llama"), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    logits(outpace.init_inference(model, device="cpu", dtype="int8"))
    assert seen == [1]


def test_what_was_quantized_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outpace"):
        llm = LLM(tiny("llama"), device="cpu", dtype="fp32", quantization="int8")
    model = tiny("llama")
    weights = [module.weight for _, module in linears(model)]
    assert llm.quantized is not None
    assert llm.quantized.weights == 2 * 4 + 1
    assert llm.quantized.before == sum(weight.nbytes for weight in weights)
    assert llm.quantized.after == sum(weight.numel() + 4 * len(weight) for weight in weights)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("quantization")]
    assert said == [f"quantization: {llm.quantized} (asked for)"]
    assert LLM(tiny("llama"), device="cpu").quantized is None
    assert LLM(tiny("llama"), device="cpu", quantization=None).quantized is None
