"""What a dtype does to a model: the same as loading it in that dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outpace
from tests.models import FAMILIES, prompts, tiny

KEPT = ("llama", "gemma3", "t5", "gpt_neox", "whisper")
IDS = prompts(6)[0][None]


def engine_of(model: nn.Module, **config: Any) -> outpace.InferenceEngine:
    return outpace.init_inference(model, device="cpu", **config)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", KEPT)
def test_every_tensor_has_the_dtype_that_from_pretrained_gives_it(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny(family).save_pretrained(tmp_path)
    loaded: Any = FAMILIES[family][0].from_pretrained(tmp_path, dtype=dtype)

    engine = engine_of(tiny(family), dtype=dtype)

    assert dtypes(engine.module) == dtypes(loaded)
    values = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for name, value in (*engine.module.named_parameters(), *engine.module.named_buffers()):
        assert torch.equal(value, values[name]), name
    assert (engine.dtype, engine.config.dtype) == (dtype, dtype)


def test_t5_keeps_its_wo_in_float32_under_float16_only() -> None:
    half = dtypes(engine_of(tiny("t5"), dtype="fp16").module)
    wo = {name for name in half if ".wo." in name}
    assert wo
    assert {name for name, dtype in half.items() if dtype == torch.float32} == wo
    assert set(dtypes(engine_of(tiny("t5"), dtype="bf16").module).values()) == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_rotary_frequencies_stay_float32_and_exact(family: str) -> None:
    expected = {name: value for name, value in tiny(family).named_buffers() if "inv_freq" in name}
    engine = engine_of(tiny(family), dtype="bf16")
    found = {name: value for name, value in engine.module.named_buffers() if "inv_freq" in name}
    assert expected
    assert expected.keys() == found.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("family", ["gpt2", "opt", "t5"])
def test_tied_weights_remain_tied(family: str) -> None:
    engine = engine_of(tiny(family), dtype="bf16")
    assert engine.get_output_embeddings().weight is engine.get_input_embeddings().weight
    assert engine.get_input_embeddings().weight.dtype == torch.bfloat16


def test_ties_of_a_plain_module_remain() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    engine_of(model, dtype="bf16")
    assert model[1].weight is model[0].weight


def test_a_plain_modules_buffers_are_converted_but_not_its_integers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("stored", torch.ones(2))
            self.register_buffer("computed", torch.ones(2), persistent=False)
            self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    assert dtypes(engine_of(Mixed(), dtype="fp16").module) == {
        "stored": torch.float16,
        "computed": torch.float32,
        "count": torch.int64,
    }


def test_a_model_in_half_precision_comes_back_to_float32_by_default() -> None:
    engine = engine_of(tiny("llama").to(torch.bfloat16))
    assert set(dtypes(engine.module).values()) == {torch.float32}
    assert engine.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "t5"])
def test_generate_runs_in_a_16_bit_dtype(family: str, dtype: str) -> None:
    assert engine_of(tiny(family), dtype=dtype).generate(IDS, max_new_tokens=4).shape[0] == 1
