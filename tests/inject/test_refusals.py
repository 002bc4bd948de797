"""What fused layers would lose is refused, and a refused model is left as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import outpace
from outpace import ConfigError, ModelError, NotSupported, OutpaceError
from tests.models import tiny


class Adapter(nn.Module):
    """A linear with a low-rank addition, as adapter libraries wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 2


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def adapted(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = Adapter(model.model.layers[1].self_attn.q_proj)


def subclassed(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.__class__ = OwnLinear


def own_norm(model: Any) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(model.config.hidden_size))
            self.variance_epsilon = 1e-5

    model.model.layers[0].input_layernorm = Norm()


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def twice_the_same_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def shared_part(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "adapter": (adapted, "merge adapters"),
    "subclass": (subclassed, "OwnLinear"),
    "norm": (own_norm, "Norm"),
    "hook": (hooked, "has a hook"),
    "layer twice": (twice_the_same_layer, "two places"),
    "shared part": (shared_part, "share weights"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_be_lost_is_refused_and_nothing_is_changed(change: str) -> None:
    model = tiny("llama")
    alter, message = CHANGES[change]
    alter(model)
    before = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ModelError, match=message):
        outpace.init_inference(model, kernel_inject=True, dtype="bf16")
    assert [type(module) for module in model.modules()] == classes
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"triangular_masking": False}, ConfigError), ({"kernels": {"rms_norm": "triton"}}, ConfigError)],
    ids=["triangular_masking", "triton on a CPU"],
)
def test_refused_options_leave_the_model_alone(options: dict[str, Any], error: type[OutpaceError]) -> None:
    model = tiny("llama")
    with pytest.raises(error):
        outpace.init_inference(model, kernel_inject=True, dtype="bf16", device="cpu", **options)
    assert next(model.parameters()).dtype == torch.float32
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_refused_family_keeps_its_dtype() -> None:
    model: Any = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=4, num_heads=4, num_layers=1, d_ff=32, vocab_size=50)
    )
    with pytest.raises(NotSupported):
        outpace.init_inference(model, kernel_inject=True, dtype="fp16")
    assert next(model.parameters()).dtype == torch.float32


def test_twice_is_once_too_often() -> None:
    engine = outpace.init_inference(tiny("llama"), kernel_inject=True)
    with pytest.raises(ModelError, match="fused already"):
        outpace.init_inference(engine.module, kernel_inject=True)
    with pytest.raises(ModelError, match="engine already"):
        outpace.init_inference(engine)


def test_fused_weights_are_not_saved(tmp_path: Any) -> None:
    engine = outpace.init_inference(tiny("llama"), kernel_inject=True)
    with pytest.raises(NotSupported, match="save_pretrained"):
        engine.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_fused_embedding_is_not_resized_and_may_be_replaced() -> None:
    engine: Any = outpace.init_inference(tiny("llama"), kernel_inject=True, dtype="fp32", device="cpu")
    with pytest.raises(NotSupported, match="resize before injection"):
        engine.resize_token_embeddings(100)
    ids = torch.tensor([[5, 6, 7]])
    engine.module.set_input_embeddings(tiny("llama", weights_seed=3).get_input_embeddings())
    other = tiny("llama")
    other.set_input_embeddings(tiny("llama", weights_seed=3).get_input_embeddings())
    expected = other.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_embedding_and_head_take_no_tokens_as_those_of_torch_do() -> None:
    module: Any = outpace.init_inference(tiny("llama"), kernel_inject=True, dtype="fp32", device="cpu").module
    assert module.get_input_embeddings()(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 32)
    assert module.lm_head(torch.zeros(2, 0, 32)).shape == (2, 0, 97)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_weights_are_not_there(family: str) -> None:
    engine = outpace.init_inference(tiny(family), kernel_inject=True)
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(NotSupported, match="output_attentions"):
        engine(input_ids=ids, output_attentions=True)
    with pytest.raises(NotSupported, match="output_attentions"):
        engine.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
