"""Folders with other people's quantized weights load and run like the plain model with the same numbers, exactly."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import outpace
from outpace.errors import ModelError
from outpace.loading.build import load
from outpace.loading.save import shard_model
from tests.loading.packers import CASES, FP8, GPTQ, add_config, e4m3, mxfp4, scales_of, write_folder
from tests.loading.tiny import tiny_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 43).reshape(2, 20)
ACTIVATIONS = {
    *("ct int8", "ct fp8 dynamic", "ct fp8 static"),
    *("fp8 blocks", "fp8 blocks, powers of two", "fp8 static", "fbgemm"),
}
"""Formats whose configs ask for quantized activations."""
LAYER = "model.layers.0.mlp.up_proj"


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS).logits
    return found


def check(folder: Path, model: PreTrainedModel) -> None:
    """Every weight, and the logits."""
    loaded = load(folder, dtype=torch.float32, device=CPU).model
    wanted = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("case", CASES)
def test_llama(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    folder = write_folder(tmp_path, model, case)
    with caplog.at_level(logging.INFO, "outpace"):
        check(folder, model)
    assert "converted to float32 while loading" in caplog.text
    assert ("activations: not quantized" in caplog.text) == (case in ACTIVATIONS)


@pytest.mark.parametrize("case", ["gptq", "awq", "ct int4", "ct fp8 static", "fp8 blocks"])
def test_mixtral_with_experts_one_by_one(tmp_path: Path, case: str) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)
    check(write_folder(tmp_path, model, case), model)


def gpt_oss(folder: Path) -> PreTrainedModel:
    """A model with experts in mxfp4, as OpenAI published it."""
    model = tiny_model("gpt_oss", num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)
    model.save_pretrained(folder)
    random, tensors = np.random.default_rng(0), {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        experts = [mxfp4(value.shape[2], value.shape[1], random) for _ in value]
        for ending in ("_blocks", "_scales"):
            tensors[name + ending] = torch.stack([expert.tensors[ending] for expert in experts])
        value.copy_(torch.stack([expert.weight.T for expert in experts]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    add_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]})
    return model


def test_gpt_oss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = gpt_oss(tmp_path)
    with caplog.at_level(logging.INFO, "outpace"):
        check(tmp_path, model)
    assert "mxfp4: converted to float32 while loading (" in caplog.text


def test_gpt_oss_with_damaged_experts(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:2].clone()}, file)
    with pytest.raises(ModelError, match=r"down_proj: _scales has the shape \[2, .*but there are 3 experts"):
        load(tmp_path, device=CPU)
    save_file({other: value for other, value in tensors.items() if other != name}, file)
    with pytest.raises(ModelError, match=r"down_proj \(expert 0\): scales is missing"):
        load(tmp_path, device=CPU)


def test_experts_of_fp8_in_one_tensor(tmp_path: Path) -> None:
    """As transformers saves them: the scales of gate_up_proj are gate_up_proj_scale_inv."""
    model = tiny_model("mixtral", num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)
    model.save_pretrained(tmp_path)
    random, tensors = np.random.default_rng(0), {}
    for name, value in model.state_dict().items():
        tensors[name] = value
        if value.dim() == 3:
            stored, numbers = e4m3(tuple(value.shape), random)
            scale = scales_of((3, -(-value.shape[1] // 40), -(-value.shape[2] // 40)), random, np.float32)
            full = scale.astype(np.float64).repeat(40, 1).repeat(40, 2)[:, : value.shape[1], : value.shape[2]]
            value.copy_(torch.from_numpy((numbers * full).astype(np.float32)))
            tensors |= {name: stored, f"{name}_scale_inv": torch.from_numpy(scale)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    add_config(tmp_path, FP8 | {"weight_block_size": [40, 40]})
    check(tmp_path, model)


@pytest.mark.parametrize("quantization", ["none", "stored"])
def test_scales_that_are_no_numbers(tmp_path: Path, quantization: str) -> None:
    """Whether weights are converted, or run from their own bits."""
    folder = write_folder(tmp_path, tiny_model("llama", num_hidden_layers=1), "ct int4")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight_scale"))
    tensors[name][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.*NaN or infinity; download the model again"):
        outpace.LLM(str(folder), dtype="fp32", device="cpu", quantization=quantization)


def test_the_dtype_is_the_models_and_numbers_are_rounded_once(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    write_folder(tmp_path, model, "gptq")
    loaded = load(tmp_path, dtype=torch.bfloat16, device=CPU).model
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16()), name
    assert not hasattr(loaded.config, "quantization_config")


def test_the_config_of_old_gptq_folders_is_a_file_of_its_own(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    write_folder(tmp_path, model, "gptq")
    add_config(tmp_path, None)
    with pytest.raises(ModelError, match=r"extra: \d+ \(model.layers.0.*qweight"):
        load(tmp_path, device=CPU)
    settings = {key: value for key, value in GPTQ.items() if key != "quant_method"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    check(tmp_path, model)


def test_biases_of_zeros_that_the_model_does_not_have(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    check(write_folder(tmp_path, model, "gptq", **{f"{LAYER}.bias": torch.zeros(96)}), model)
    with pytest.raises(ModelError, match=r"extra: 1 \(model.layers.0.mlp.up_proj.bias\)"):
        load(write_folder(tmp_path, model, "gptq", **{f"{LAYER}.bias": torch.ones(96)}), device=CPU)


def test_scales_of_the_cache_are_left_out(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    more = {
        f"model.layers.0.self_attn.{part}": torch.ones(1)
        for part in ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale")
    }
    check(write_folder(tmp_path, model, "ct fp8 static", **more), model)


WRONG: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "a scale is missing": ("gptq", {f"{LAYER}.scales": None}, f"{LAYER}: scales is missing"),
    "another shape": ("awq", {f"{LAYER}.scales": torch.ones(2, 8)}, r"has the shape \[2, 8\] instead of \[2, 96\]"),
    "a weight is missing": ("ct int4", {f"{LAYER}.weight_packed": None}, r"missing: 1 \(model.layers.0.mlp.up_proj.w"),
    "a scale too many": ("ct int4", {"model.norm.weight_scale": torch.ones(1)}, r"extra: 1 \(model.norm.weight_scale"),
    "of another size": (
        "ct int8",
        {f"{LAYER}.weight": torch.ones(8, 64).char(), f"{LAYER}.weight_scale": torch.ones(8, 1)},
        r"up_proj.weight: \[8, 64\] instead of \[96, 64\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_folders(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes, says = WRONG[case]
    folder = write_folder(tmp_path, tiny_model("llama", num_hidden_layers=1), kind, **changes)
    monkeypatch.setattr("outpace.loading.build.fill", None)  # nothing may come this far
    with pytest.raises(ModelError, match=says) as caught:
        load(folder, device=CPU)
    assert str(folder) in str(caught.value)


def test_what_is_not_read_is_refused_with_the_folder_and_the_remedy(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_model("llama", num_hidden_layers=1), "gptq")
    add_config(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ModelError, match=r"quant_method 'bitsandbytes' is not supported; .*use the original") as caught:
        load(tmp_path, device=CPU)
    assert str(caught.value).startswith(f"model: {tmp_path}: ")


def test_init_inference_takes_the_folder_as_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    folder = write_folder(tmp_path, model, "awq")
    with outpace.OnDevice("meta"):
        empty: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    engine = outpace.init_inference(empty, checkpoint=str(folder), dtype=torch.float32)
    assert torch.equal(engine(IDS).logits, logits(model))


def test_a_plain_checkpoint_for_a_model_whose_config_says_quantized(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    write_folder(tmp_path / "gptq", model, "gptq")
    model.save_pretrained(tmp_path / "plain")
    with outpace.OnDevice("meta"):
        empty: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "gptq"))
    engine = outpace.init_inference(empty, checkpoint=str(tmp_path / "plain"), dtype=torch.float32)
    assert torch.equal(engine(IDS).logits, logits(model))


@pytest.mark.parametrize("case", ["ct int4", "fp8 blocks"])
def test_llm_and_shards(tmp_path: Path, case: str) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    folder = write_folder(tmp_path / "model", model, case)
    model.save_pretrained(tmp_path / "plain")
    shard_model(folder, 2, tmp_path / "shards")
    assert "quantization_config" not in (tmp_path / "shards" / "config.json").read_text()
    check(tmp_path / "shards", model)
    greedy = outpace.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = []
    for source in (folder, tmp_path / "plain"):
        with outpace.LLM(str(source), dtype=torch.float32, device="cpu", max_model_len=64) as llm:
            found.append(llm.generate([IDS[0].tolist()], greedy)[0].outputs[0].token_ids)
    assert found[0] == found[1]
