"""Models that no policy knows: their own layers over pages, and the reasons why some are refused."""

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import masking_utils

import outpace
from outpace import ConfigError, InferenceEngine, ModelError, NotSupported
from outpace.inject.experts_interface import stacked_experts
from outpace.inject.interface import Interface
from outpace.inject.policies import by_class
from outpace.inject.probe import window_of
from outpace.kernels import dispatch
from outpace.kernels.dispatch import IMPLEMENTATIONS, Kernels, choose_kernels
from outpace.kernels.experts import experts_torch
from tests.inject.checks import CPU, LONG, NEW_TOKENS, padded_prompts
from tests.inject.families import VOCAB, made
from tests.inject.level0 import LATENT, MIXED, SMALL, engine
from tests.models import tiny

SHARED: Mapping[str, Any] = {
    **MIXED, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "intermediate_size": [64] * 4, "activation_sparsity_pattern": None, "laurel_rank": 4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "olmo2": ("Olmo2", SMALL),
    "yarn": ("Olmo2", {**SMALL, "rope_parameters": YARN}),
    "olmo3": ("Olmo3", MIXED),
    "glm4": ("Glm4", SMALL),
    "exaone4": ("Exaone4", MIXED),
    "helium": ("Helium", SMALL),
    "seed_oss": ("SeedOss", SMALL),
    "ernie4_5": ("Ernie4_5", SMALL),
    "hunyuan": ("HunYuanDenseV1", SMALL),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 1}),
    "flex_olmo": ("FlexOlmo", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    "vaultgemma": ("VaultGemma", {**MIXED, "attn_logit_softcapping": 20.0, "attn_implementation": "eager"}),
    "gemma3n": ("Gemma3n", SHARED),
}
REFUSED: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "chunks": ("Llama4", {**SMALL, "num_local_experts": 2, "intermediate_size_mlp": 64}, "type chunked_attention"),
    "a hybrid": ("Lfm2", {**SMALL, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "a secret hybrid": ("RecurrentGemma", {**SMALL, "num_hidden_layers": 3}, "1 of its 3 layers call attention"),
    "its own attention": ("BioGpt", SMALL, "_supports_attention_backend"),
    "no keywords": ("Nemotron", SMALL, "does not receive the keyword arguments"),
    "two attentions": ("DiffLlama", SMALL, "calls attention more than once"),
    "both ways": ("Glm4", {**SMALL, "is_causal": False}, "is_causal=False"),
    "a rope that changes": ("Olmo2", {**SMALL, "rope_parameters": {**YARN, "rope_type": "dynamic"}}, "type dynamic"),
    "a cache that forgets": ("Moshi", {**SMALL, "ffn_dim": 64, "sliding_window": 5}, "cache keeps 5|does not receive"),
    "a mask of its own": ("Doge", SMALL, "in a forward over pages"),
}


@functools.cache
def plain(family: str) -> Any:
    return made(*FAMILIES[family])


def level0(family: str, **options: Any) -> InferenceEngine:
    return engine(copy.deepcopy(plain(family)), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_hugging_face(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = plain(family), padded_prompts(VOCAB, length=LONG)
    assert not {type(module).__name__ for module in model.modules()} & by_class().keys()
    with caplog.at_level(logging.INFO, "outpace"):
        fast = level0(family)
        found = fast.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(found, model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False))
    assert f"level 0: its own layers, attention over pages (no policy knows the layers of {type(model).__name__}; " in (
        caplog.text
    )
    assert "Hugging Face's loop" not in caplog.text
    assert torch.equal(fast(**inputs).logits, model(**inputs).logits)
    assert fast.config._attn_implementation == model.config._attn_implementation


@pytest.mark.parametrize("family", ["olmo2", "olmo3", "deepseek_v3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_samples_are_those_of_hugging_face(family: str, batch: int) -> None:
    inputs, options = padded_prompts(VOCAB, batch), {"max_new_tokens": 24, "do_sample": True, "temperature": 1.5}
    model, engine = plain(family), level0(family)  # making them may draw numbers too
    torch.manual_seed(5)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(5)
    assert torch.equal(engine.generate(**inputs, **options), expected)


def test_one_sequence_without_padding() -> None:
    ids = padded_prompts(VOCAB, batch=1, length=LONG)["input_ids"]
    expected = plain("glm4").generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(level0("glm4").generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_a_gpu(family: str, graphs: bool) -> None:
    model, inputs = copy.deepcopy(plain(family)).cuda(), {k: v.cuda() for k, v in padded_prompts(VOCAB).items()}
    fast = level0(family, device="cuda", enable_cuda_graph=graphs)
    for _ in range(2):  # the second time from graphs that are there
        found = fast.generate(**inputs, max_new_tokens=24, do_sample=False)
        assert torch.equal(found, model.generate(**inputs, max_new_tokens=24, do_sample=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_pass_the_check(dtype: torch.dtype) -> None:
    found = level0("flex_olmo", dtype=dtype).generate(**padded_prompts(VOCAB), max_new_tokens=4)
    assert found.shape == (3, 16)


def test_each_step_has_one_time() -> None:
    fast = level0("olmo2")
    fast.profile_model_time()
    fast.generate(**padded_prompts(VOCAB), max_new_tokens=5, do_sample=False)
    assert len(fast.model_times()) == 5


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case: str) -> None:
    name, options, reason = REFUSED[case]
    model = made(name, options)
    with pytest.raises(NotSupported, match=f"no policy for the layers of {name}ForCausalLM, and .*({reason})"):
        engine(model)


def test_steps_of_its_own_are_refused() -> None:
    model = made("Olmo2", SMALL)
    model.__class__ = type("Own", (type(model),), {"prepare_inputs_for_generation": lambda self, ids, **_: {}})
    with pytest.raises(NotSupported, match=r"no policy for the layers of Own, and .*prepares the inputs"):
        engine(model)


EXPERTS = ("deepseek_v2", "deepseek_v3", "flex_olmo")


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_ours_behind_the_model_s_own_routers(
    family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Size] = []
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", {**IMPLEMENTATIONS, "experts": {"torch": watched(seen)}})
    with caplog.at_level(logging.INFO, "outpace"):
        fast = level0(family)
    assert "experts: ours, after the model's own routers" in caplog.text
    seen.clear()
    inputs = padded_prompts(VOCAB)
    found = fast.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert seen
    module: Any = fast.module
    assert module.config._experts_implementation != "outpace"
    seen.clear()
    assert torch.equal(found, plain(family).generate(**inputs, max_new_tokens=8, do_sample=False))
    fast.module(**inputs)
    assert not seen, "outside of generate over pages the model is as it was"


def watched(seen: list[torch.Size], wrong: float = 0.0) -> Any:
    def run(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(x.shape)
        return experts_torch(x, *args, **options) + wrong

    return run


def test_experts_that_give_other_logits_keep_out_of_the_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Size] = []
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", {**IMPLEMENTATIONS, "experts": {"torch": watched(seen, 0.1)}})
    with caplog.at_level(logging.INFO, "outpace"):
        fast = level0("flex_olmo")
    assert "experts: the model's own (with ours: " in caplog.text
    seen.clear()
    inputs = padded_prompts(VOCAB)
    found = fast.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, plain("flex_olmo").generate(**inputs, max_new_tokens=8, do_sample=False))
    assert not seen


def test_experts_that_are_not_looked_for_stay_the_model_s_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outpace"):
        level0("flex_olmo", moe={"enabled": False})
    assert "experts: " not in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_transposed": True}, "stores its weights as"),
        ({"is_concatenated": False}, "alternates rows of gate and up"),
        ({"has_post_expert_norm": True}, "has a norm after each expert"),
        ({"_is_expert_parallel": True}, "shares its experts with other ranks"),
        ({"act_fn": nn.Tanh()}, "has an activation that no kernel knows"),
    ],
)
def test_experts_that_our_kernels_cannot_run_are_named(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("FlexOlmo", FAMILIES["flex_olmo"][1])
    for name, value in change.items():
        setattr(model.model.layers[0].mlp.experts, name, value)
    with caplog.at_level(logging.INFO, "outpace"):
        assert stacked_experts(model, choose_kernels(CPU)) is None
    assert f"experts: the model's own (FlexOlmoExperts {reason}" in caplog.text


def test_what_does_not_generate_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"AlbertModel, and .* not a generative model"):
        engine(hf.AlbertModel(hf.AlbertConfig(embedding_size=16, hidden_size=32, num_attention_heads=4)))
    with pytest.raises(NotSupported, match=r"T5ForConditionalGeneration, and .* an encoder with a decoder"):
        engine(tiny("t5"))


def test_a_refused_model_is_as_it_was() -> None:
    model = made("Nemotron", SMALL)
    before = model.config._attn_implementation
    with pytest.raises(NotSupported):
        engine(model)
    assert model.config._attn_implementation == before
    model.generate(**padded_prompts(VOCAB), max_new_tokens=2)


def test_level_0_is_for_causal_models() -> None:
    with pytest.raises(ConfigError, match="triangular_masking=False: Olmo2ForCausalLM is a causal model"):
        level0("olmo2", triangular_masking=False)


def wrong_scale(attention: Any, *args: Any, scale: float, **options: Any) -> Any:
    return attention(*args, scale=2 * scale, **options)


def wrong_window(attention: Any, *args: Any, **options: Any) -> Any:
    return attention(*args, **{**options, "window": 4})


def wrong_step(attention: Any, q: Any, k: Any, v: Any, table: Any, *args: Any, **options: Any) -> Any:
    return attention(q, k, v, table.flip(0) if args[2] == 1 else table, *args, **options)


def no_write(rotary: Any, qkv: Any, *args: Any, **options: Any) -> Any:
    return qkv


def broken() -> dict[str, Kernels]:
    kernels = choose_kernels(CPU)
    faults = (("attention", wrong_scale), ("attention", wrong_window), ("attention", wrong_step), ("rotary", no_write))
    return {
        fault.__name__: dataclasses.replace(kernels, **{op: functools.partial(fault, vars(kernels)[op])})
        for op, fault in faults
    }


@pytest.mark.parametrize("fault", ["wrong_scale", "wrong_window", "wrong_step", "no_write"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_catches_wrong_attention(fault: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(plain("glm4")).to(dtype)
    with pytest.raises(NotSupported, match=r"its logits over pages differ from its own by \d"):
        Interface(model, broken()[fault]).paged()


def test_the_check_lets_right_attention_pass() -> None:
    assert Interface(copy.deepcopy(plain("glm4")), choose_kernels(CPU)).paged()(64).kv_heads == [(2, 8, 8)] * 2


def chunked(size: int) -> Any:
    return masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


def prefix(*place: Any) -> Any:
    return (place[3] < 7) | masking_utils.causal_mask_function(*place)


@pytest.mark.parametrize(
    ("mask", "candidates", "window"),
    [
        (masking_utils.causal_mask_function, (None,), 0),
        (masking_utils.causal_mask_function, (4096,), 0),
        (masking_utils.sliding_window_causal_mask_function(4096), (None, 4096), 4096),
        (masking_utils.sliding_window_causal_mask_function(100_000), (100_000,), 100_000),
        (masking_utils.sliding_window_causal_mask_function(4096), (4095, 4097), None),
        (masking_utils.bidirectional_mask_function, (None,), None),
        (masking_utils.sliding_window_bidirectional_mask_function(64), (64,), None),
        (chunked(8192), (8192,), None),
        (chunked(3), (3,), None),
        (prefix, (None,), None),
    ],
)
def test_the_window_of_a_mask(mask: Any, candidates: tuple[Any, ...], window: int | None) -> None:
    assert window_of(mask, candidates) == window


@pytest.mark.parametrize(
    ("value", "says"),
    [(0.0, "all logits of Olmo2ForCausalLM are zero; its weights"), (math.nan, "gives NaN without Outpace")],
)
def test_item_25_weights_that_say_nothing_are_named(value: float, says: str) -> None:
    model = hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    with pytest.raises(ModelError, match=f"model: .*{says}"):
        outpace.LLM(model, device="cpu")
