"""Models without weights: what is made on the meta device, and what is computed in them."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import outpace
from outpace.config import LLMConfig
from outpace.load_paged import load_paged
from outpace.loading.build import load
from tests.loading.skeletons import make
from tests.models import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["gptj", "deepseek_v3", "gemma3", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_tensor_is_what_hugging_face_would_load(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    expected = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found = load(tmp_path, dtype=dtype, device=CPU).model
    with outpace.OnDevice("meta"):
        empty = hf.AutoModelForCausalLM.from_config(expected.config, dtype=dtype)
    filled = outpace.init_inference(empty, dtype=dtype, device="cpu", checkpoint=tmp_path).module
    for model in (found, filled):
        for kind in ("named_parameters", "named_buffers"):
            own = dict(getattr(model, kind)())
            for name, value in getattr(expected, kind)():
                assert own[name].dtype == value.dtype, name
                assert torch.equal(own[name], value), name  # GPT-J's positions, DeepSeek's biases of experts


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_positions_that_are_computed_and_not_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = hf.MarianConfig(vocab_size=97, d_model=16, pad_token_id=1, decoder_start_token_id=1, **sizes)
    hf.MarianMTModel(config).save_pretrained(tmp_path)
    expected: Any = hf.MarianMTModel.from_pretrained(tmp_path, dtype=dtype)
    with outpace.OnDevice("meta"):
        empty = hf.MarianMTModel(config)
    found = outpace.init_inference(empty, dtype=dtype, device="cpu", checkpoint=tmp_path).module.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


class Scaled(hf.LlamaForCausalLM):
    """A model that keeps a weight in a dtype of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.decay = nn.Parameter(torch.zeros(3, dtype=torch.float32))


def test_a_weight_keeps_the_dtype_that_its_class_gives_it() -> None:
    engine: Any = outpace.init_inference(Scaled(tiny("llama").config), dtype="bf16", device="cpu")
    assert (engine.module.decay.dtype, engine.module.lm_head.weight.dtype) == (torch.float32, torch.bfloat16)


def test_on_device_inside_another_and_entered_twice() -> None:
    meta, cpu = outpace.OnDevice("meta"), outpace.OnDevice("cpu")
    with meta:
        with cpu, cpu:
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert [made.weight.device.type for made in (inner, outer, after)] == ["cpu", "meta", "cpu"]


def test_on_device_concerns_one_thread_and_no_buffers() -> None:
    made: list[nn.Module] = []
    with outpace.OnDevice(torch.bfloat16, "meta"):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        norm = nn.BatchNorm1d(2)
    assert made[0].get_parameter("weight").device.type == "cpu"
    assert norm.running_mean is not None
    assert (norm.weight.dtype, norm.running_mean.dtype, norm.running_mean.is_meta) == (
        torch.bfloat16,
        torch.float32,
        False,
    )


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_that_is_loaded_inside_on_device_has_its_weights(device: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with outpace.OnDevice(device):
        parts = load_paged(tmp_path, LLMConfig(dtype="fp32", device="cpu"), tokenizer=False)
    assert {parameter.device.type for parameter in parts.module.parameters()} == {"cpu"}


def test_threads_that_load_leave_torch_as_it_was(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    failed: list[BaseException] = []

    def load_several(dtype: str) -> None:
        try:
            for _ in range(3):
                load_paged(tmp_path, LLMConfig(dtype=dtype, device="cpu"), tokenizer=False)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=load_several, args=[dtype]) for dtype in ("bf16", "fp16", "fp32", "bf16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torch.get_default_dtype() == torch.float32


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)  # keeps a list of its weights
        self.number = nn.Parameter(torch.tensor(2.0))
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.several = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0] * self.number + self.counts.sum() + self.several[0] * self.several[1]


@pytest.mark.parametrize("made", ["on device", "meta", "live", "dropped"])
def test_weights_of_every_kind_of_module_are_replaced(made: str, tmp_path: Path) -> None:
    model, x = Recurrent(), torch.randn(1, 3, 4)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    around: Any = {"on device": outpace.OnDevice("meta"), "meta": torch.device("meta")}.get(made, torch.device("cpu"))
    with around:
        other = Recurrent()
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "checkpoint": tmp_path / "weights.pt"}
    engine = outpace.init_inference(other, **options, set_empty_params=made == "dropped")
    torch.testing.assert_close(engine(x), model(x))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(2.0), persistent=False)


def test_buffers_without_values_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    torch.save(Table().state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        empty = Table()
    with pytest.raises(outpace.ModelError, match=r"1 \(table\); make the module under outpace.OnDevice"):
        outpace.init_inference(empty, dtype="fp32", device="cpu", checkpoint=tmp_path / "weights.pt")
    assert empty.inner.weight.is_meta
