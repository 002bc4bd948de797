"""Limits of what quantization costs the default model; calibrated weights are evaluated on other text."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from outpace.loading.build import load
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked
from outpace.loading.text import built_in_text
from tests.quant.fake import fake_quantized, rounded
from tests.quant.real import as_quantized, rounded_int4

pytestmark = [pytest.mark.real, pytest.mark.slow]
CALIBRATED = 2048  # tokens at the beginning of the text that calibration reads


@pytest.fixture(scope="module")
def model(default_model_folder: Path) -> Any:
    """The module and the tokens of the built-in text."""
    loaded = load(default_model_folder, dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.tokenizer is not None
    loaded.model.ids = torch.tensor(loaded.tokenizer(built_in_text(), add_special_tokens=False)["input_ids"])
    return loaded.model


def losses(model: Any, ids: Tensor) -> list[Tensor]:
    """The loss of each token in nats, for each window of 1,024 tokens."""
    found = []
    for window in ids.split(1024):
        with torch.inference_mode():
            logits = model(input_ids=window[None]).logits[0, :-1].float()
        found.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return found


def perplexity(found: list[Tensor]) -> float:
    return torch.cat(found).mean().exp().item()


@pytest.fixture(scope="module")
def plain(model: Any) -> list[Tensor]:
    """The losses of the model itself on the whole text."""
    return losses(model, model.ids)


def after_calibration(found: list[Tensor]) -> list[Tensor]:
    """The losses on the text that calibration did not read."""
    return found[CALIBRATED // 1024 :]


def test_int8_costs_at_most_half_a_percent(model: Any, plain: list[Tensor]) -> None:
    engine = outpace.init_inference(copy.deepcopy(model), device="cpu", dtype="fp32", quant={"scheme": "int8"})
    assert perplexity(losses(engine, model.ids)) <= 1.005 * perplexity(plain)


def test_smoothed_w8a8_costs_at_most_two_percent(
    model: Any, plain: list[Tensor], default_model_folder: Path, tmp_path: Path
) -> None:
    quantize_model(default_model_folder, tmp_path / "out", Asked("w8a8", smooth=0.5, dtype=torch.float32))
    made = as_quantized(copy.deepcopy(model), tmp_path / "out", rows=True)
    after = losses(made, model.ids[CALIBRATED:])
    assert perplexity(after) <= 1.02 * perplexity(after_calibration(plain))


def test_gptq_recovers_two_fifths_of_what_int4_loses(
    model: Any, plain: list[Tensor], default_model_folder: Path, tmp_path: Path
) -> None:
    quantize_model(default_model_folder, tmp_path / "out", Asked("int4", method="gptq", dtype=torch.float16))
    made = as_quantized(copy.deepcopy(model), tmp_path / "out")
    made.lm_head.weight = torch.nn.Parameter(rounded(model.lm_head.weight.detach()))
    ids = model.ids[CALIBRATED:]
    before, after = perplexity(after_calibration(plain)), perplexity(losses(made, ids))
    nearest = perplexity(losses(fake_quantized(copy.deepcopy(model), rounded_int4), ids))
    assert nearest - after >= 0.4 * (nearest - before)
