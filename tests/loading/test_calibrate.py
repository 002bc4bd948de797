"""Calibration: GPTQ and SmoothQuant by `outpace quantize`, on tiny models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from outpace import LLM, init_inference
from outpace.config.quantization import CalibrationConfig
from outpace.errors import ConfigError, ModelError, NotSupported
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked
from tests.loading.tiny import tiny_model
from tests.loading.unpack import config_of, stored, unpacked
from tests.quant.real import as_quantized

IDS = tuple((7 * i * i + 3 * i) % 61 for i in range(256))
TEXT = CalibrationConfig(text=IDS, tokens=256)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with grouped heads whose activations have outliers: two channels of its norms are large."""
    torch.manual_seed(0)
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[[3, 11]] *= 30
        layer.post_attention_layernorm.weight.data[5] *= 30
    folder = tmp_path_factory.mktemp("llama") / "model"
    model.float().save_pretrained(folder)
    return folder


def plain(model: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def change(model: Path, made: Any) -> float:
    """How far the logits of other tokens than those of the calibration are from the model's."""
    ids = torch.tensor([[(5 * i * i + i + 2) % 61 for i in range(96)]])
    with torch.inference_mode():
        exact = plain(model)(ids).logits
        return float((made(ids).logits - exact).norm() / exact.norm())


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_gptq_changes_outputs_less_than_rounding(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize_model(llama, tmp_path / "rtn", Asked(scheme))
    written = quantize_model(llama, tmp_path / "gptq", Asked(scheme, method="gptq", calibration=TEXT))
    first, second = (change(llama, as_quantized(plain(llama), tmp_path / name)) for name in ("rtn", "gptq"))
    assert second < 0.9 * first
    assert written.errors.keys() == {f"{name}.weight" for name in unpacked(tmp_path / "gptq")}
    assert stored(tmp_path / "gptq").keys() == stored(tmp_path / "rtn").keys()
    assert config_of(tmp_path / "gptq") == config_of(tmp_path / "rtn")


def test_smoothing_makes_quantized_activations_better(llama: Path, tmp_path: Path) -> None:
    quantize_model(llama, tmp_path / "plain", Asked("w8a8"))
    quantize_model(llama, tmp_path / "smooth", Asked("w8a8", smooth=0.5, calibration=TEXT))
    first, second = (as_quantized(plain(llama), tmp_path / name, rows=True) for name in ("plain", "smooth"))
    assert change(llama, second) < 0.7 * change(llama, first)


def test_what_is_folded_is_written(llama: Path, tmp_path: Path) -> None:
    """Norms, rows and columns are other ones, and the model is the same."""
    quantize_model(llama, tmp_path / "out", Asked("int8", smooth=0.5, calibration=TEXT))
    before, after = stored(llama), stored(tmp_path / "out")
    norms = {name for name in before if "input_layernorm" in name or "post_attention_layernorm" in name}
    assert norms
    assert all(not torch.equal(before[name], after[name].float()) for name in norms)
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert change(llama, as_quantized(plain(llama), tmp_path / "out")) < 0.1


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_models_whose_norms_are_not_known_are_refused(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    with pytest.raises((NotSupported, ModelError), match=r"smooth|Conv1D"):
        quantize_model(tmp_path / "model", tmp_path / "out", Asked("int8", smooth=0.5, calibration=TEXT))
    assert not (tmp_path / "out").exists()


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path / "model")
    with pytest.raises(NotSupported, match=r"method: model.layers.0.*exclude experts"):
        quantize_model(tmp_path / "model", tmp_path / "out", Asked("int4", method="gptq", calibration=TEXT))


def test_weights_that_are_not_finite_are_named(llama: Path, tmp_path: Path) -> None:
    model: Any = hf.AutoModelForCausalLM.from_pretrained(llama)
    model.model.layers[0].self_attn.q_proj.weight.data[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="NaN or infinity"):
        quantize_model(tmp_path / "model", tmp_path / "out", Asked("int4", method="gptq", calibration=TEXT))
    with pytest.raises(ModelError, match=r"quant: model.layers.0.self_attn.q_proj.weight.* NaN or infinity"):
        LLM(tmp_path / "model", device="cpu", quantization="int8")
    with pytest.raises(ModelError, match=r"quant: model.layers.0.self_attn.q_proj.weight.* NaN or infinity"):
        init_inference(model, device="cpu", quant={"scheme": "int4"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "awq"}, "method: expected rtn or gptq"),
        ({"smooth": 1.5}, "smooth: expected a number from 0 to 1"),
        ({"calibration": TEXT}, "text: rounding to nearest needs no text"),
        ({"method": "gptq", "calibration": CalibrationConfig(text=(1, 10**6) * 8)}, "token 1000000 is not among"),
        ({"method": "gptq", "calibration": CalibrationConfig(text="nowhere.txt")}, "nowhere.txt"),
    ],
    ids=str,
)
def test_options_that_cannot_work(options: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        quantize_model(llama, tmp_path / "out", Asked("int4", **options))
