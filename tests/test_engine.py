"""InferenceEngine: it is still the caller's module, several live side by side, and it lets go of everything."""

import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerFast, TextGenerationPipeline

import outpace
from outpace import InferenceEngine, StateError
from tests.models import padded, prompts, tiny

IDS = prompts(6)[0][None]


def engine_of(model: nn.Module, **config: Any) -> InferenceEngine:
    return outpace.init_inference(model, **{"dtype": "fp32", "device": "cpu", **config})


def model_of(engine: InferenceEngine) -> Any:
    """The engine, used as the model it stands for."""
    return engine


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Box:
    value: torch.Tensor
    label: str


class Nested(nn.Module):
    """Takes and gives tensors inside dicts, tuples, named tuples and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, batch: dict[str, Any], pair: Pair, *, box: Box) -> dict[str, Any]:
        value = self.scale * batch["x"] + batch["more"][0]
        return {"box": Box(value, box.label), "pair": Pair(pair.right, pair.left), "list": [value, (value,)], "n": 2}


class Failing(nn.Module):
    """Raises its own error when asked."""

    def forward(self, value: torch.Tensor, *, fail: bool = False) -> torch.Tensor:
        if fail:
            raise ZeroDivisionError("the model's own error")
        return value + 1


def test_the_models_attributes_are_read_through() -> None:
    model = tiny("llama")
    engine = model_of(engine_of(model))
    assert engine.module is model
    assert engine.config is model.config
    assert engine.generation_config is model.generation_config
    assert engine.get_input_embeddings() is model.get_input_embeddings()
    assert engine.lm_head is model.lm_head
    assert (engine.device, engine.dtype) == (torch.device("cpu"), torch.float32)
    assert isinstance(engine, nn.Module)
    assert not engine.training
    assert not model.training


def test_an_attribute_that_neither_has_is_the_models_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"LlamaForCausalLM.*no attribute 'nonsense'"):
        _ = engine_of(tiny("llama")).nonsense


def test_a_plain_module_keeps_its_nested_inputs_and_outputs() -> None:
    engine = engine_of(Nested())
    batch = {"x": torch.ones(2), "more": [torch.tensor(1.0)]}
    output = engine(batch, Pair(torch.zeros(1), torch.ones(1)), box=Box(torch.ones(1), "name"))
    assert isinstance(output["box"], Box)
    assert isinstance(output["pair"], Pair)
    assert output["box"].label == "name"
    assert output["list"][1][0].tolist() == [4.0, 4.0]
    assert output["pair"].left.tolist() == [1.0]
    assert (engine.info.kind, engine.info.can_generate) == ("plain", False)
    assert not output["box"].value.requires_grad


def test_the_models_own_errors_pass_through() -> None:
    engine = engine_of(Failing())
    with pytest.raises(ZeroDivisionError, match="the model's own error"):
        engine(torch.ones(1), fail=True)
    assert engine(torch.ones(1)).tolist() == [2.0]


def test_a_wrong_forward_says_what_the_model_says() -> None:
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        engine_of(tiny("llama"))()


def test_it_works_as_the_model_of_a_pipeline(tokenizer: PreTrainedTokenizerFast) -> None:
    size = len(tokenizer)
    pipe = TextGenerationPipeline(model=tiny("llama", vocab_size=size), tokenizer=tokenizer, device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    expected = pipe(["hello", "a longer prompt"], batch_size=2, **options)

    pipe.model = model_of(engine_of(tiny("llama", vocab_size=size)))

    assert pipe(["hello", "a longer prompt"], batch_size=2, **options) == expected


def test_engines_live_side_by_side() -> None:
    first, second = engine_of(tiny("llama")), engine_of(tiny("llama", weights_seed=1), dtype="bf16")
    third = engine_of(tiny("gpt2"), max_out_tokens=8)
    expected = [tiny("llama")(IDS).logits, engine_of(tiny("llama", weights_seed=1), dtype="bf16")(IDS).logits]
    second.profile_model_time()
    assert torch.equal(first(IDS).logits, expected[0])
    assert torch.equal(second(IDS).logits, expected[1])
    with pytest.raises(outpace.InputError):
        third.generate(IDS, max_new_tokens=3)
    third.destroy()
    assert first.generate(IDS, max_new_tokens=3).shape == (1, 9)
    assert len(second.model_times()) == 1
    with pytest.raises(StateError):
        first.model_times()
    assert torch.equal(first(IDS).logits, expected[0])


def test_two_engines_of_one_module_share_it() -> None:
    model = tiny("llama")
    first, second = engine_of(model), engine_of(model, max_out_tokens=7)
    first.destroy()
    assert second.generate(IDS, max_new_tokens=1).shape == (1, 7)


@pytest.mark.parametrize("profiled", [False, True])
def test_destroy_lets_go_of_the_model(profiled: bool) -> None:
    model = tiny("llama")
    engine = engine_of(model)
    if profiled:
        engine.profile_model_time(modules=True)
    engine.generate(IDS, max_new_tokens=2)
    alive = weakref.ref(model)
    engine.destroy()
    del model
    gc.collect()
    assert alive() is None


def test_destroy_leaves_the_callers_model_as_it_was() -> None:
    model = tiny("llama")
    engine = engine_of(model)
    engine.profile_model_time(modules=True)
    engine.destroy()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(model(IDS).logits, tiny("llama")(IDS).logits)


def test_use_after_destroy_is_said_clearly() -> None:
    engine = engine_of(tiny("llama"))
    engine.destroy()
    engine.destroy()  # a second time is harmless
    for call in (lambda: engine(IDS), lambda: engine.generate(IDS), engine.profile_model_time):
        with pytest.raises(StateError, match="the engine is destroyed; make a new one"):
            call()
    with pytest.raises(StateError):
        engine.model_times()
    with pytest.raises(StateError):
        _ = engine.generation_config
    with pytest.raises(AttributeError):
        _ = engine.config
    assert engine.device == torch.device("cpu")


def test_a_context_manager_destroys_at_its_end() -> None:
    with engine_of(tiny("llama")) as engine:
        assert engine(IDS).logits.shape == (1, 6, 97)
    with pytest.raises(StateError):
        engine(IDS)


def test_a_context_manager_destroys_after_an_error_too() -> None:
    with pytest.raises(KeyError, match="inside"), engine_of(tiny("llama")) as engine:
        raise KeyError("inside")
    with pytest.raises(StateError):
        engine(IDS)


def test_a_callers_cache_is_updated_in_place_by_forward() -> None:
    engine = engine_of(tiny("llama"))
    cache = DynamicCache(config=engine.config)
    output = engine(IDS[:, :4], past_key_values=cache, use_cache=True)
    assert output.past_key_values is cache
    assert cache.get_seq_length() == 4
    rest = engine(IDS[:, 4:], past_key_values=cache).logits
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(rest, engine(IDS).logits[:, 4:])


def test_a_callers_cache_is_updated_in_place_by_generate() -> None:
    engine = engine_of(tiny("llama"))
    cache = DynamicCache(config=engine.config)
    output = engine.generate(IDS, past_key_values=cache, max_new_tokens=4, return_dict_in_generate=True)
    assert output.past_key_values is cache
    assert cache.get_seq_length() == 6 + 4 - 1


def test_a_local_graph_submodule_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not engine_of(model).info.graphs_itself
    model[1].enable_cuda_graph = True  # type: ignore[assignment]
    assert engine_of(model).info.graphs_itself


def test_an_engine_keeps_no_gradients() -> None:
    engine = engine_of(tiny("llama"))
    assert not engine(IDS).logits.requires_grad
    assert torch.is_grad_enabled()


def test_parameters_and_state_are_the_modules() -> None:
    model = tiny("llama")
    engine = engine_of(model)
    assert [id(weight) for weight in engine.parameters()] == [id(weight) for weight in model.parameters()]
    assert set(engine.state_dict()) == {f"module.{name}" for name in model.state_dict()}


@pytest.mark.parametrize("threads", [2])
def test_generate_from_several_threads(threads: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = engine_of(tiny("llama"))
    batches = [padded(prompts(5, 3, seed=seed), "right") for seed in range(4)]
    expected = [engine.generate(**batch, max_new_tokens=8) for batch in batches]
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda batch: engine.generate(**batch, max_new_tokens=8), batches))
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
